// x[t] = (x[t] + rms(y[t]) * post) * scale, then the norms of x[t] that follow. One workgroup per token, whose
// threads keep their EACH vec4s of the row. The slot `added` says what y is, `next_norms` what follows.
// uses: workgroup_sum added next_norms

struct Params {
    eps: f32,
}

override THREADS: u32;
override WIDTH: u32;

var<storage, read_write> x: array<vec4<f32>>;
var<storage, read> post: array<vec4<f32>>;
var<storage, read> scale: array<f32>;

const VEC4S: u32 = WIDTH / 4u;
const EACH: u32 = (VEC4S + THREADS - 1u) / THREADS;

alias Row = array<vec4<f32>, EACH>; // a thread's vec4s; beyond the end of the row, zeros

fn column_of(each: u32, thread: u32) -> u32 {
    return min(each * THREADS + thread, VEC4S - 1u);
}

fn is_live(each: u32, thread: u32) -> bool {
    return each * THREADS + thread < VEC4S;
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
    let at = group.x * VEC4S;
    // All reads are requested before anything is waited for.
    var sum: Row;
    var weights: Row;
    for (var each = 0u; each < EACH; each++) {
        let column = column_of(each, thread);
        sum[each] = select(vec4(0.0), x[at + column], is_live(each, thread));
        weights[each] = post[column];
    }
    let following = next_weights(thread);
    let added = added_row(at, thread);
    let factor = scale[0];
    let added_root = inverse_root(added, thread);
    for (var each = 0u; each < EACH; each++) {
        sum[each] = (sum[each] + added[each] * added_root * weights[each]) * factor;
        if (is_live(each, thread)) {
            x[at + column_of(each, thread)] = sum[each];
        }
    }
    store_next(at, sum, following, thread);
}
