// x[t] = (x[t] + rms(y[t]) * post) * scale, then h[t] = rms(x[t]) * next: one workgroup for each
// token. put_float or put_integer stores h.

struct Params {
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> y: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> post: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> scale: array<f32>;
@group(0) @binding(5) var<storage, read> next: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> x: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> h: array<Stored>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let fours = params.width / 4u;
    let at = group.x * fours;
    let width = f32(params.width);
    var squares = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        squares += dot(y[at + i], y[at + i]);
    }
    let y_scale = inverseSqrt(workgroup_sum(squares, thread) / width + params.eps);
    squares = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        let sum = (x[at + i] + y[at + i] * y_scale * post[i]) * scale[0];
        x[at + i] = sum;
        squares += dot(sum, sum);
    }
    let x_scale = inverseSqrt(workgroup_sum(squares, thread) / width + params.eps);
    for (var first = 0u; first < fours; first += THREADS) {
        let i = min(first + thread, fours - 1u);
        let live = first + thread < fours;
        put_four(at + first + thread, x[at + i] * x_scale * next[i], live, thread);
    }
}
