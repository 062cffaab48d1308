// A dispatch of attention_prefill covers some keys (whole tiles of them) after those of an earlier one: it
// resumes with each query's best score and total in `suspended` and the weighted values in `out`, and leaves
// them there for the next, until the last divides by the total.

struct Params {
    begin: u32, // the keys of the dispatch, counted from the first that is attended to
    end: u32,
}

var<storage, read_write> suspended: array<vec4<f32>>; // [tile, best and total, QUADS]

fn range_begin(low: u32) -> u32 {
    return low + params.begin;
}

fn range_end(low: u32, high: u32) -> u32 {
    return min(high, low + params.end);
}

fn resume(softmax: ptr<function, Softmax>, tile: u32, thread: u32) {
    let at = 2u * tile * QUADS + thread % QUADS;
    (*softmax).best = suspended[at];
    if (thread < QUADS) {
        (*softmax).total = suspended[at + QUADS];
    }
}

fn suspend(best: vec4<f32>, tile: u32, thread: u32) {
    if (thread < QUADS) {
        let at = 2u * tile * QUADS + thread;
        suspended[at] = best;
        suspended[at + QUADS] = total_of(thread);
    }
}
