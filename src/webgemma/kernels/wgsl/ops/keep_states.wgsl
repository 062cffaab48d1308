// states[slot] = the state that the head has read of a conversation's last token: of its rows, the last one whose result
// remains. It is x[row] itself or, NORMED, rms(x[row]) * w. One workgroup for each row.
// uses: batch=rows workgroup_sum

struct Params {
    width: u32,
    eps: f32,
}

struct TokenLogprob {
    id: u32,
    logprob: f32,
}

override THREADS: u32;
override NORMED: bool;

const NO_TOKEN: u32 = 0xffffffffu;

var<storage, read> results: array<TokenLogprob>; // see accept_drafts
var<storage, read> x: array<vec4<f32>>;
var<storage, read> w: array<vec4<f32>>;
var<storage, read_write> states: array<vec4<f32>>; // [slot, width]

// Whether a row is the last of its conversation whose result remains.
fn is_last(row: u32) -> bool {
    if (row >= batch.count || results[row].id == NO_TOKEN || has_ended(batch.rows[row])) {
        return false;
    }
    let next = min(row + 1u, MAX_SLOTS - 1u);
    let follows = next < batch.count && next > row && slot_in(batch.rows[next]) == slot_in(batch.rows[row]);
    return !follows || results[next].id == NO_TOKEN;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.x;
    if (!is_last(row)) {
        return;
    }
    let vec4s = params.width / 4u;
    let to = slot_in(batch.rows[row]) * vec4s;
    var scale = 1.0;
    if (NORMED) {
        var squares = 0.0;
        for (var i = thread; i < vec4s; i += THREADS) {
            squares += dot(x[row * vec4s + i], x[row * vec4s + i]);
        }
        scale = inverseSqrt(workgroup_sum(squares, thread) / f32(params.width) + params.eps);
    }
    for (var i = thread; i < vec4s; i += THREADS) {
        var state = x[row * vec4s + i];
        if (NORMED) {
            state = state * scale * w[i];
        }
        states[to + i] = state;
    }
}
