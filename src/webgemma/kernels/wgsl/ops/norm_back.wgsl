// dx = r (g - x r² mean(g x)), g = w dy, r = 1 / √(mean(x²) + eps): what the input of y = w x r owes.
// One workgroup for each row of `width`; a token has several where heads are normed one by one, and
// x and dx may have more of them than dy.

struct Params {
    width: u32,
    eps: f32,
    rows: u32, // of a token, in dy
    x_rows: u32, // and in x and dx, where they begin with x_first
    x_first: u32,
    weighted: u32, // 0: there is no w
    w_first: u32, // where w begins
    add: u32, // 1: to what dx holds
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> w: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> dy: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> dx: array<vec4<f32>>;

fn owed(at: u32, i: u32) -> vec4<f32> {
    if (params.weighted == 1u) {
        return dy[at + i] * w[params.w_first / 4u + i];
    }
    return dy[at + i];
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let fours = params.width / 4u;
    let at = (group.y * params.rows + group.x) * fours;
    let x_at = (group.y * params.x_rows + params.x_first + group.x) * fours;
    var squares = 0.0;
    var products = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        squares += dot(x[x_at + i], x[x_at + i]);
        products += dot(x[x_at + i], owed(at, i));
    }
    let r = inverseSqrt(workgroup_sum(squares, thread) / f32(params.width) + params.eps);
    let mean = workgroup_sum(products, thread) / f32(params.width);
    if (group.y >= state.count) {
        return;
    }
    for (var i = thread; i < fours; i += THREADS) {
        let value = r * (owed(at, i) - x[x_at + i] * (r * r * mean));
        if (params.add == 1u) {
            dx[x_at + i] += value;
        } else {
            dx[x_at + i] = value;
        }
    }
}
