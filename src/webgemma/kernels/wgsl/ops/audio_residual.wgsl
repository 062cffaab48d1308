// x[t] = x[t] + y or, if NORMED, x[t] + rms(y) * post, where y is y[t] clamped to bounds; if ENDING, then
// x[t] = rms(x[t]) * end. What follows is h[t] = rms(x[t]) * next, clamped to other bounds. One workgroup per row, whose
// threads keep their EACH vec4s of it.
// uses: workgroup_sum clamped

struct Params {
    eps: f32,
    y_low: f32,
    y_high: f32,
    h_low: f32,
    h_high: f32,
}

override THREADS: u32;
override WIDTH: u32;
override NORMED: bool;
override ENDING: bool;

var<storage, read_write> x: array<vec4<f32>>;
var<storage, read> y: array<vec4<f32>>;
var<storage, read> post: array<vec4<f32>>;
var<storage, read> end: array<vec4<f32>>;
var<storage, read> next: array<vec4<f32>>;
var<storage, read_write> h: array<vec4<f32>>;

const VEC4S: u32 = WIDTH / 4u;
const EACH: u32 = (VEC4S + THREADS - 1u) / THREADS;

alias Row = array<vec4<f32>, EACH>; // a thread's vec4s; beyond the end of the row, zeros

fn inverse_root(row: Row, thread: u32) -> f32 {
    var squares = 0.0;
    for (var each = 0u; each < EACH; each++) {
        squares += dot(row[each], row[each]);
    }
    return inverseSqrt(workgroup_sum(squares, thread) / f32(WIDTH) + params.eps);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    var row: Row;
    var added: Row;
    for (var each = 0u; each < EACH; each++) {
        let i = each * THREADS + thread;
        if (i < VEC4S) {
            row[each] = x[group.x * VEC4S + i];
            added[each] = clamped4(y[group.x * VEC4S + i], params.y_low, params.y_high);
        }
    }
    if (NORMED) {
        let root = inverse_root(added, thread);
        for (var each = 0u; each < EACH; each++) {
            added[each] = added[each] * root * post[min(each * THREADS + thread, VEC4S - 1u)];
        }
    }
    for (var each = 0u; each < EACH; each++) {
        row[each] += added[each];
    }
    if (ENDING) {
        let root = inverse_root(row, thread);
        for (var each = 0u; each < EACH; each++) {
            row[each] = row[each] * root * end[min(each * THREADS + thread, VEC4S - 1u)];
        }
    }
    let root = inverse_root(row, thread);
    for (var each = 0u; each < EACH; each++) {
        let i = each * THREADS + thread;
        if (i < VEC4S) {
            x[group.x * VEC4S + i] = row[each];
            let values = row[each] * root * next[i];
            h[group.x * VEC4S + i] = clamped4(values, params.h_low, params.h_high);
        }
    }
}
