// own = cap * tanh(logit / cap), suppressed tokens at LOWEST; changed = own after the repetition and
// presence penalties on the recent tokens, plus the bias. One workgroup for each CHUNK of tokens, which
// also finds the best of both and the sum of exp(own). Logits that are not finite count as 0 and raise
// the alarm of partial.wgsl. Leaves the bins of `weigh` empty.

struct Params {
    vocab: u32,
    cap: f32, // 0: none
    suppressed_count: u32,
    ring: u32, // of `tokens`
    words: u32, // of `bins`
}

struct Bias {
    id: u32,
    value: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> settings: Settings;
@group(0) @binding(2) var<storage, read> state: State;
@group(0) @binding(3) var<storage, read> logits: array<f32>;
@group(0) @binding(4) var<storage, read> tokens: array<u32>;
@group(0) @binding(5) var<storage, read> suppressed: array<u32>;
@group(0) @binding(6) var<storage, read> biases: array<Bias>;
@group(0) @binding(7) var<storage, read_write> values: array<f32>; // [changed, own] of each token
@group(0) @binding(8) var<storage, read_write> partials: array<Partial>;
@group(0) @binding(9) var<storage, read_write> bins: array<u32>;

var<workgroup> held: array<f32, CHUNK>;
var<workgroup> seen: array<atomic<u32>, CHUNK / 32u>;

fn capped(logit: f32) -> f32 {
    if (params.cap > 0.0) {
        return params.cap * tanh(clamp(logit / params.cap, -15.0, 15.0));
    }
    return clamp(logit, LOWEST, -LOWEST);
}

fn penalised(value: f32, at: u32) -> f32 {
    let recent = extractBits(atomicLoad(&seen[at / 32u]), at % 32u, 1u) == 1u;
    if (!recent || value <= LOWEST) {
        return value;
    }
    let penalty = settings.repetition_penalty;
    return select(value * penalty, value / penalty, value > 0.0) - settings.presence_penalty;
}

// Marks every token of the chunk that is among the recent ones; ids below `first` wrap past `count`.
fn mark_recent(first: u32, count: u32, thread: u32) {
    let length = state.first + state.count;
    let window = min(min(settings.recent, length), params.ring);
    for (var i = thread; i < window; i += THREADS) {
        let at = tokens[(length - 1u - i) % params.ring] - first;
        if (at < count) {
            atomicOr(&seen[at / 32u], 1u << (at % 32u));
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let first = group.x * CHUNK;
    let count = min(CHUNK, params.vocab - first);
    for (var i = group.x * THREADS + thread; i < params.words; i += groups.x * THREADS) {
        bins[i] = 0u;
    }
    var alarm = 0.0;
    for (var at = thread; at < count; at += THREADS) {
        let logit = logits[first + at];
        if (is_finite(logit)) {
            held[at] = capped(logit);
        } else {
            held[at] = 0.0;
            alarm = ALARM;
        }
    }
    if (thread < CHUNK / 32u) {
        atomicStore(&seen[thread], 0u);
    }
    workgroupBarrier();
    for (var i = thread; i < params.suppressed_count; i += THREADS) {
        let at = suppressed[i] - first;
        if (at < count) {
            held[at] = LOWEST;
        }
    }
    mark_recent(first, count, thread);
    workgroupBarrier();

    var mine = Best(LOWEST, first);
    for (var at = thread; at < count; at += THREADS) {
        values[2u * (first + at) + 1u] = held[at];
        mine = better(mine, Best(held[at], first + at));
    }
    let own = workgroup_best(mine, thread);
    var sum = alarm;
    for (var at = thread; at < count; at += THREADS) {
        sum += exp(held[at] - own.value);
        held[at] = penalised(held[at], at);
    }
    sum = workgroup_sum(sum, thread);
    for (var i = thread; i < settings.bias_count; i += THREADS) {
        let at = biases[i].id - first;
        if (at < count) {
            held[at] += biases[i].value;
        }
    }
    workgroupBarrier();

    mine = Best(LOWEST, first);
    for (var at = thread; at < count; at += THREADS) {
        values[2u * (first + at)] = held[at];
        mine = better(mine, Best(held[at], first + at));
    }
    let best = workgroup_best(mine, thread);
    if (thread == 0u) {
        partials[group.x] = Partial(best, own, sum);
    }
}
