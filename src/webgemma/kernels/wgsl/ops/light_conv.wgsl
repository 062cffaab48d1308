// h[t] = silu(rms(c) * norm), clamped to bounds, where c = sum over i of taps[i] g[t + i - 4] and
// g = value * sigmoid(gate), both halves of a row of u clamped to other bounds; before the first row g is zero.
// One workgroup per row, whose threads keep their shares of it.
// uses: row silu clamped store_whole

struct Params {
    u_low: f32,
    u_high: f32,
    h_low: f32,
    h_high: f32,
}

override THREADS: u32;

var<storage, read> u: array<vec4<f32>>; // of a token: values, then gates
var<storage, read> taps: array<vec4<f32>>; // [5, WIDTH]
var<storage, read> norm: array<vec4<f32>>;

const PAST: u32 = 4u;

fn clamped_u(at: u32) -> vec4<f32> {
    return clamped4(u[at], params.u_low, params.u_high);
}

fn convolved(t: u32, i: u32) -> vec4<f32> {
    var sum = vec4(0.0);
    for (var back = 0u; back <= min(PAST, t); back++) {
        let at = (t - back) * 2u * VEC4S + i;
        sum += taps[(PAST - back) * VEC4S + i] * clamped_u(at) * sigmoid(clamped_u(at + VEC4S));
    }
    return sum;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    var row: Row;
    for (var each = 0u; each < SHARE; each++) {
        if (is_live(each, thread)) {
            row[each] = convolved(group.x, column_of(each, thread));
        }
    }
    let root = inverse_root(row, thread);
    for (var each = 0u; each < SHARE; each++) {
        let values = silu(row[each] * root * norm[column_of(each, thread)]);
        row[each] = clamped4(values, params.h_low, params.h_high);
    }
    store_whole(group.x, row, thread);
}
