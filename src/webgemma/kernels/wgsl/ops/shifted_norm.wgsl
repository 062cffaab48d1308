// h[t] = rms(x[t] + shift) * w: one workgroup for each row.

struct Params {
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> shift: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> w: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> h: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let fours = params.width / 4u;
    let at = group.x * fours;
    var squares = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        let four = x[at + i] + shift[i];
        squares += dot(four, four);
    }
    let scale = inverseSqrt(workgroup_sum(squares, thread) / f32(params.width) + params.eps);
    for (var i = thread; i < fours; i += THREADS) {
        h[at + i] = (x[at + i] + shift[i]) * scale * w[i];
    }
}
