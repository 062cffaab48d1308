// out[t] = (x[t] + rms(y[t]) * w) * scale: one workgroup for each token.

struct Params {
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> y: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> w: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> scale: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let fours = params.width / 4u;
    let at = group.x * fours;
    var squares = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        squares += dot(y[at + i], y[at + i]);
    }
    let r = inverseSqrt(workgroup_sum(squares, thread) / f32(params.width) + params.eps);
    for (var i = thread; i < fours; i += THREADS) {
        out[at + i] = (x[at + i] + y[at + i] * r * w[i]) * scale[0];
    }
}
