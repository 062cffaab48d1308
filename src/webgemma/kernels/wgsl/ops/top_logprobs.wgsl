// The likeliest tokens by the model's own logits, settings.top_logprobs of them, with log-probabilities, next to
// where the chosen one goes. One workgroup: thread i keeps the best of chunk i that has not been reported yet.
// uses: batch=tokens partials sampling_settings

struct Params {
    vocab: u32,
    parts: u32, // chunks, at most THREADS
}

struct TokenLogprob {
    id: u32,
    logprob: f32,
}

override THREADS: u32;
override CHUNK: u32;
override RESULTS: u32;
override TOP: u32;

var<storage, read> partials: array<Partial>;
var<storage, read> values: array<vec2<f32>>; // penalised, own
var<storage, read_write> results: array<TokenLogprob>;

// The best of a chunk after `last`.
fn next(chunk: u32, last: Best, thread: u32) -> Best {
    var mine = Best(LOWEST, NO_ID);
    let end = min((chunk + 1u) * CHUNK, params.vocab);
    for (var id = chunk * CHUNK + thread; id < end; id += THREADS) {
        let value = values[id].y;
        if (value < last.value || (value == last.value && id > last.id)) {
            mine = better(mine, Best(value, id));
        }
    }
    return workgroup_best(mine, thread);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    let total = log_total(params.parts, thread);
    let first = (batch.first + batch.count) % RESULTS * (1u + TOP) + 1u;
    var mine = Best(LOWEST, NO_ID);
    if (thread < params.parts) {
        mine = partials[thread].own;
    }
    for (var i = 0u; i < min(settings.top_logprobs, TOP); i++) {
        let best = workgroup_best(mine, thread);
        if (thread == 0u) {
            results[first + i] = TokenLogprob(best.id, best.value - total);
        }
        let chunk = best.id / CHUNK;
        let following = next(chunk, best, thread);
        if (thread == chunk) {
            mine = following;
        }
    }
}
