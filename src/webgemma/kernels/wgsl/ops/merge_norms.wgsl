// out[t] = rms(a[t]) * w1 + rms(b[t]) * w2: one workgroup for each token.

struct Params {
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> a: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<f32>;
@group(0) @binding(3) var<storage, read> w1: array<f32>;
@group(0) @binding(4) var<storage, read> w2: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = group.x * params.width;
    let width = f32(params.width);
    var a_squares = 0.0;
    var b_squares = 0.0;
    for (var i = thread; i < params.width; i += THREADS) {
        a_squares += a[at + i] * a[at + i];
        b_squares += b[at + i] * b[at + i];
    }
    let a_root = inverseSqrt(workgroup_sum(a_squares, thread) / width + params.eps);
    let b_root = inverseSqrt(workgroup_sum(b_squares, thread) / width + params.eps);
    for (var i = thread; i < params.width; i += THREADS) {
        out[at + i] = a[at + i] * a_root * w1[i] + b[at + i] * b_root * w2[i];
    }
}
