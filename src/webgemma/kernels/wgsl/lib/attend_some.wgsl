// A dispatch of attention_prefill sees some keys (whole tiles of them) after those of an earlier one:
// it finds each query's best score and total in `left` and what was gathered in `out`, and leaves
// them there for the next, until the last divides by the total.

@group(0) @binding(6) var<storage, read_write> left: array<vec4<f32>>; // [place, best and total, QUADS]

fn begin_of(low: u32) -> u32 {
    return low + params.begin;
}

fn end_of(low: u32, high: u32) -> u32 {
    return min(high, low + params.end);
}

fn find_best(softmax: ptr<function, Softmax>, place: u32, thread: u32) {
    let at = 2u * place * QUADS + thread % QUADS;
    (*softmax).best = left[at];
    if (thread < QUADS) {
        (*softmax).total = left[at + QUADS];
    }
}

fn leave_best(best: vec4<f32>, place: u32, thread: u32) {
    if (thread < QUADS) {
        let at = 2u * place * QUADS + thread;
        left[at] = best;
        left[at + QUADS] = total_of(thread);
    }
}
