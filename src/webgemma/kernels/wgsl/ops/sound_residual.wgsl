// x[t] = x[t] + y or, if NORMED, x[t] + rms(y) * post, where y is y[t] held between two bounds; if ENDING,
// then x[t] = rms(x[t]) * end. What follows is h[t] = rms(x[t]) * next, held between two others. One
// workgroup for each row, whose threads keep their EACH fours of it.

struct Params {
    eps: f32,
    y_low: f32,
    y_high: f32,
    h_low: f32,
    h_high: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> y: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> post: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> end: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> next: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> h: array<vec4<f32>>;

const FOURS: u32 = WIDTH / 4u;
const EACH: u32 = (FOURS + THREADS - 1u) / THREADS;

alias Row = array<vec4<f32>, EACH>; // a thread's fours; beyond the end of the row, zeros

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
        if (i < FOURS) {
            row[each] = x[group.x * FOURS + i];
            added[each] = clamp(y[group.x * FOURS + i], vec4(params.y_low), vec4(params.y_high));
        }
    }
    if (NORMED == 1u) {
        let root = inverse_root(added, thread);
        for (var each = 0u; each < EACH; each++) {
            added[each] *= root * post[min(each * THREADS + thread, FOURS - 1u)];
        }
    }
    for (var each = 0u; each < EACH; each++) {
        row[each] += added[each];
    }
    if (ENDING == 1u) {
        let root = inverse_root(row, thread);
        for (var each = 0u; each < EACH; each++) {
            row[each] *= root * end[min(each * THREADS + thread, FOURS - 1u)];
        }
    }
    let root = inverse_root(row, thread);
    for (var each = 0u; each < EACH; each++) {
        let i = each * THREADS + thread;
        if (i < FOURS) {
            x[group.x * FOURS + i] = row[each];
            let four = row[each] * root * next[i];
            h[group.x * FOURS + i] = clamp(four, vec4(params.h_low), vec4(params.h_high));
        }
    }
}
