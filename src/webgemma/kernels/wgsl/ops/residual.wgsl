// x[t] = (x[t] + rms(y[t]) * post) * scale, then what follows of rms(x[t]): one workgroup for each
// token. y_one or y_two says what y is, next_one or next_three what follows, put_float or put_integer
// how it is stored.

struct Params {
    width: u32,
    eps: f32,
    m_place: u32, // of next_three
    s_place: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> h: array<Stored>;
@group(0) @binding(3) var<storage, read> post: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> scale: array<f32>;
@group(0) @binding(5) var<storage, read> next: array<vec4<f32>>;

fn inverse_root(squares: f32, thread: u32) -> f32 {
    return inverseSqrt(workgroup_sum(squares, thread) / f32(params.width) + params.eps);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let fours = params.width / 4u;
    let at = group.x * fours;
    let sizes = y_sizes(at, thread);
    var squares = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        let y = y_four(at, i, sizes);
        squares += dot(y, y);
    }
    let y_scale = inverse_root(squares, thread);
    squares = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        let sum = (x[at + i] + y_four(at, i, sizes) * y_scale * post[i]) * scale[0];
        x[at + i] = sum;
        squares += dot(sum, sum);
    }
    let x_scale = inverse_root(squares, thread);
    for (var first = 0u; first < fours; first += THREADS) {
        let i = min(first + thread, fours - 1u);
        let live = first + thread < fours;
        put_next(at + first + thread, i, x[at + i] * x_scale, live, thread);
    }
}
