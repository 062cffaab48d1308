// h[t] = rms(x[t]) * w: one workgroup for each token. put_float or put_integer stores h.

struct Params {
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> w: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> h: array<Stored>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let fours = params.width / 4u;
    let at = group.x * fours;
    var squares = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        squares += dot(x[at + i], x[at + i]);
    }
    let mean = workgroup_sum(squares, thread) / f32(params.width);
    let scale = inverseSqrt(mean + params.eps);
    for (var first = 0u; first < fours; first += THREADS) {
        let i = min(first + thread, fours - 1u);
        let live = first + thread < fours;
        put_four(at + first + thread, x[at + i] * scale * w[i], live, thread);
    }
}
