// x[t] = (x[t] + rms(y[t]) * post) * scale, then what follows of rms(x[t]): one workgroup for each
// token, whose threads keep their EACH fours of the row. y_one or y_two says what y is, next_none,
// next_one or next_three what follows, put_float or put_integer how it is stored.

struct Params {
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

const FOURS: u32 = WIDTH / 4u;
const EACH: u32 = (FOURS + THREADS - 1u) / THREADS;

alias Row = array<vec4<f32>, EACH>; // a thread's fours; beyond the end of the row, zeros

fn four_of(each: u32, thread: u32) -> u32 {
    return min(each * THREADS + thread, FOURS - 1u);
}

fn is_live(each: u32, thread: u32) -> bool {
    return each * THREADS + thread < FOURS;
}

fn inverse_root(row: Row, thread: u32) -> f32 {
    var squares = 0.0;
    for (var each = 0u; each < EACH; each++) {
        squares += dot(row[each], row[each]);
    }
    return inverseSqrt(workgroup_sum(squares, thread) / f32(WIDTH) + params.eps);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = group.x * FOURS;
    // All that is needed is asked for before anybody waits.
    var sum: Row;
    var weights: Row;
    for (var each = 0u; each < EACH; each++) {
        let four = four_of(each, thread);
        sum[each] = select(vec4(0.0), x[at + four], is_live(each, thread));
        weights[each] = post[four];
    }
    let following = next_weights(thread);
    let y = y_row(at, thread);
    let factor = scale[0];
    let y_root = inverse_root(y, thread);
    for (var each = 0u; each < EACH; each++) {
        sum[each] = (sum[each] + y[each] * y_root * weights[each]) * factor;
        if (is_live(each, thread)) {
            x[at + four_of(each, thread)] = sum[each];
        }
    }
    put_next(at, sum, following, thread);
}
