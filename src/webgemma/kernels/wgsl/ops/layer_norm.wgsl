// h[t] = (y - mean) / sqrt(variance + eps) * w + b, where y = x[t] + shift: one workgroup for each row.
// Without SHIFTED, y = x[t].

struct Params {
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> shift: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> w: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> h: array<vec4<f32>>;

fn value(at: u32, i: u32) -> vec4<f32> {
    if (SHIFTED == 1u) {
        return x[at + i] + shift[i];
    }
    return x[at + i];
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let fours = params.width / 4u;
    let at = group.x * fours;
    var sum = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        sum += dot(value(at, i), vec4(1.0));
    }
    let mean = workgroup_sum(sum, thread) / f32(params.width);
    var squares = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        let four = value(at, i) - mean;
        squares += dot(four, four);
    }
    let scale = inverseSqrt(workgroup_sum(squares, thread) / f32(params.width) + params.eps);
    for (var i = thread; i < fours && group.x < state.count; i += THREADS) {
        h[at + i] = (value(at, i) - mean) * scale * w[i] + b[i];
    }
}
