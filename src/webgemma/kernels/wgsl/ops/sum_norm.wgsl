// x[t] = rms(x[t] + y[t]), in place: one workgroup for each token.

struct Params {
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> y: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let fours = params.width / 4u;
    let at = group.x * fours;
    var squares = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        let sum = x[at + i] + y[at + i];
        x[at + i] = sum;
        squares += dot(sum, sum);
    }
    let mean = workgroup_sum(squares, thread) / f32(params.width);
    let scale = inverseSqrt(mean + params.eps);
    for (var i = thread; i < fours; i += THREADS) {
        x[at + i] *= scale;
    }
}
