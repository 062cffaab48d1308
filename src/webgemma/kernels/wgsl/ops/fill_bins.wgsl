// Tallies of the tokens of each bin, a bin being a quarter of a nat below the best penalised logit. One workgroup for
// each CHUNK of a row adds up its own, then adds them to the tallies of all.
// uses: batch=rows partials tally token_order

struct Params {
    vocab: u32,
    parts: u32, // chunks of the vocabulary
}

override THREADS: u32;
override CHUNK: u32;

var<storage, read> partials: array<Partial>;
var<storage, read> values: array<vec2<f32>>; // of each token of a row: penalised, own
var<storage, read_write> bins: array<atomic<u32>>;

fn add_to_bins(at: u32) {
    let x = atomicLoad(&sums[at]);
    let to = row * ROW_WORDS + at;
    let low = atomicAdd(&bins[to], x);
    atomicAdd(&bins[to + BINS], atomicLoad(&sums[at + BINS]) + select(0u, 1u, low + x < low));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    row = group.y;
    settings = settings_table[slot_in(batch.rows[row])];
    clear_sums(thread);
    let best = best_penalised(params.parts, thread).value;
    let end = min((group.x + 1u) * CHUNK, params.vocab);
    for (var id = group.x * CHUNK + thread; id < end; id += THREADS) {
        let value = values[row * params.vocab + id].x;
        add_to_sums(bin_of(value, best), value, best);
    }
    workgroupBarrier();
    let count = atomicLoad(&sums[thread]); // of bin `thread`
    if (count > 0u) {
        atomicAdd(&bins[row * ROW_WORDS + thread], count);
        add_to_bins(thread + BINS);
        add_to_bins(thread + 3u * BINS);
    }
}
