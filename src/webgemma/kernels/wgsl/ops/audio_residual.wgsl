// x[t] = x[t] + y or, if NORMED, x[t] + rms(y) * post, where y is y[t] clamped to bounds; if ENDING, then
// x[t] = rms(x[t]) * end. What follows is h[t] = rms(x[t]) * next, clamped to other bounds. One workgroup per row, whose
// threads keep their shares of it.
// uses: row clamped store_whole

struct Params {
    y_low: f32,
    y_high: f32,
    h_low: f32,
    h_high: f32,
}

override THREADS: u32;
override NORMED: bool;
override ENDING: bool;

var<storage, read_write> x: array<vec4<f32>>;
var<storage, read> y: array<vec4<f32>>;
var<storage, read> post: array<vec4<f32>>;
var<storage, read> end: array<vec4<f32>>;
var<storage, read> next: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    var row: Row;
    var added: Row;
    for (var each = 0u; each < SHARE; each++) {
        if (is_live(each, thread)) {
            let at = group.x * VEC4S + column_of(each, thread);
            row[each] = x[at];
            added[each] = clamped4(y[at], params.y_low, params.y_high);
        }
    }
    if (NORMED) {
        let root = inverse_root(added, thread);
        for (var each = 0u; each < SHARE; each++) {
            added[each] = added[each] * root * post[column_of(each, thread)];
        }
    }
    for (var each = 0u; each < SHARE; each++) {
        row[each] += added[each];
    }
    if (ENDING) {
        let root = inverse_root(row, thread);
        for (var each = 0u; each < SHARE; each++) {
            row[each] = row[each] * root * end[column_of(each, thread)];
        }
    }
    let root = inverse_root(row, thread);
    var following: Row;
    for (var each = 0u; each < SHARE; each++) {
        let column = column_of(each, thread);
        if (is_live(each, thread)) {
            x[group.x * VEC4S + column] = row[each];
        }
        following[each] = clamped4(row[each] * root * next[column], params.h_low, params.h_high);
    }
    store_whole(group.x, following, thread);
}
