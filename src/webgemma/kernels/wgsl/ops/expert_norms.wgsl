// What the experts' side needs of the residual x: the router's input s[t] = rms(x[t]) * shrink * scale
// (shrink is 1 / sqrt(width)) and the experts' input m[t] = rms(x[t]) * w. One workgroup for each token.

struct Params {
    width: u32,
    eps: f32,
    shrink: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> scale: array<f32>;
@group(0) @binding(3) var<storage, read> w: array<f32>;
@group(0) @binding(4) var<storage, read_write> s: array<f32>;
@group(0) @binding(5) var<storage, read_write> m: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = group.x * params.width;
    var squares = 0.0;
    for (var i = thread; i < params.width; i += THREADS) {
        squares += x[at + i] * x[at + i];
    }
    let mean = workgroup_sum(squares, thread) / f32(params.width);
    let root = inverseSqrt(mean + params.eps);
    for (var i = thread; i < params.width; i += THREADS) {
        let normed = x[at + i] * root;
        s[at + i] = normed * params.shrink * scale[i];
        m[at + i] = normed * w[i];
    }
}
