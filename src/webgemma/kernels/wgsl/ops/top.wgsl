// The settings.top likeliest tokens by the model's own logits, with log-probabilities, next to where the
// chosen one goes. One workgroup: thread i keeps the best of chunk i that has not been reported yet.

struct Params {
    vocab: u32,
    parts: u32, // chunks, at most THREADS
}

struct Pair {
    id: u32,
    logprob: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> settings: Settings;
@group(0) @binding(2) var<storage, read> state: State;
@group(0) @binding(3) var<storage, read> partials: array<Partial>;
@group(0) @binding(4) var<storage, read> values: array<vec2<f32>>; // changed, own
@group(0) @binding(5) var<storage, read_write> results: array<Pair>;

// The best of a chunk after `last`.
fn next(chunk: u32, last: Best, thread: u32) -> Best {
    var mine = Best(LOWEST, NOBODY);
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
    let slot = (state.first + state.count) % RESULTS * (1u + TOP) + 1u;
    var mine = Best(LOWEST, NOBODY);
    if (thread < params.parts) {
        mine = partials[thread].own;
    }
    for (var i = 0u; i < min(settings.top, TOP); i++) {
        let best = workgroup_best(mine, thread);
        if (thread == 0u) {
            results[slot + i] = Pair(best.id, best.value - total);
        }
        let chunk = best.id / CHUNK;
        let following = next(chunk, best, thread);
        if (thread == chunk) {
            mine = following;
        }
    }
}
