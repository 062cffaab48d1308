// The likeliest tokens by the model's own logits, settings.top_logprobs of them, with log-probabilities, after
// where the chosen ones go. One workgroup for each row: thread i keeps the best of chunk i that has not been reported yet.
// uses: batch=rows partials sampling_settings

struct Params {
    vocab: u32,
    parts: u32, // chunks, at most THREADS
    rows: u32, // of logits
}

struct TokenLogprob {
    id: u32,
    logprob: f32,
}

override THREADS: u32;
override CHUNK: u32;
override TOP: u32;

var<storage, read> partials: array<Partial>;
var<storage, read> values: array<vec2<f32>>; // of each token of a row: penalised, own
var<storage, read_write> results: array<TokenLogprob>;

// The best of a chunk after `last`.
fn next(chunk: u32, last: Best, thread: u32) -> Best {
    var mine = Best(LOWEST, NO_ID);
    let end = min((chunk + 1u) * CHUNK, params.vocab);
    for (var id = chunk * CHUNK + thread; id < end; id += THREADS) {
        let value = values[row * params.vocab + id].y;
        if (value < last.value || (value == last.value && id > last.id)) {
            mine = better(mine, Best(value, id));
        }
    }
    return workgroup_best(mine, thread);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    row = group.x;
    let wanted = settings_table[slot_in(batch.rows[group.x])].top_logprobs;
    let total = log_total(params.parts, thread);
    var mine = Best(LOWEST, NO_ID);
    if (thread < params.parts) {
        mine = partials[row * params.parts + thread].own;
    }
    for (var i = 0u; i < min(wanted, TOP); i++) {
        let best = workgroup_best(mine, thread);
        if (thread == 0u && row < batch.count) {
            results[(i + 1u) * params.rows + row] = TokenLogprob(best.id, best.value - total);
        }
        let chunk = best.id / CHUNK;
        let following = next(chunk, best, thread);
        if (thread == chunk) {
            mine = following;
        }
    }
}
