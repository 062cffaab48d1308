// own = cap * tanh(logit / cap), suppressed tokens at LOWEST; penalised = own after the repetition, presence and
// frequency penalties on the recent tokens, plus the bias, at LOWEST where a mask forbids the token. One workgroup for each CHUNK of a row, which also finds
// the best of both and the sum of exp(own). Logits that are not finite count as 0 and raise the alarm of partials.
// Leaves the bins of fill_bins empty.
// uses: place=rows allowed finite softcap workgroup_best workgroup_sum partials token_order token_values sampling_settings

struct Params {
    vocab: u32,
    suppressed_count: u32,
    ring: u32, // length of `tokens` of a conversation
    most_biases: u32, // of a conversation
}

struct Bias {
    id: u32,
    value: f32,
}

override THREADS: u32;
override CHUNK: u32;

var<storage, read> logits: array<f32>; // [row, vocab]
var<storage, read> tokens: array<u32>; // [slot, ring]
var<storage, read> biases: array<Bias>; // of suppressed tokens, then [slot, most_biases]
var<storage, read_write> partials: array<Partial>;
var<storage, read_write> bins: array<u32>;

var<workgroup> chunk: array<f32, CHUNK>;
var<workgroup> times: array<atomic<u32>, CHUNK / 2u>; // that a token is among the recent ones, 16 bits each

const MOST_TIMES: u32 = 0xffffu;

fn capped(logit: f32) -> f32 {
    if (params.cap > 0.0) { // 0: none
        return softcapped(logit);
    }
    return clamp(logit, LOWEST, -LOWEST);
}

fn penalised(value: f32, at: u32) -> f32 {
    let count = extractBits(atomicLoad(&times[at / 2u]), 16u * (at % 2u), 16u);
    if (count == 0u || value <= LOWEST) {
        return value;
    }
    let penalty = settings.repetition_penalty;
    let difference = settings.presence_penalty + f32(count) * settings.frequency_penalty;
    return select(value * penalty, value / penalty, value > 0.0) - difference;
}

// The logit of a token before penalties and bias.
fn own_logit(id: u32) -> f32 {
    let logit = logits[row * params.vocab + id];
    return select(0.0, capped(logit), is_finite(logit));
}

// One more time for a token of the chunk; what is full stays, so that it does not run over into its neighbour.
fn count_token(at: u32) {
    loop {
        let old = atomicLoad(&times[at / 2u]);
        if (extractBits(old, 16u * (at % 2u), 16u) == MOST_TIMES) {
            break;
        }
        if (atomicCompareExchangeWeak(&times[at / 2u], old, old + (1u << (16u * (at % 2u)))).exchanged) {
            break;
        }
    }
}

// The token at a position of a conversation, or the draft that is read there.
fn token_at(slot: u32, position: u32) -> u32 {
    let last = batch.conversations[slot].position;
    if (position > last) {
        return batch.drafts[slot * MAX_DRAFTS + position - last - 1u];
    }
    return tokens[slot * params.ring + position % params.ring];
}

// Counts how often every token of the chunk is among the recent ones; ids below `first` wrap past `count`.
fn count_recent(slot: u32, first: u32, count: u32, thread: u32) {
    let length = position_of(row) + 1u;
    let window = min(min(settings.recent, length), params.ring);
    for (var i = thread; i < window; i += THREADS) {
        let at = token_at(slot, length - 1u - i) - first;
        if (at < count) {
            count_token(at);
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    row = group.y;
    let slot = slot_of(row);
    settings = settings_table[slot];
    let first = group.x * CHUNK;
    let count = min(CHUNK, params.vocab - first);
    for (var i = group.x * THREADS + thread; i < ROW_WORDS; i += groups.x * THREADS) {
        bins[row * ROW_WORDS + i] = 0u;
    }
    var alarm = 0.0;
    for (var at = thread; at < count; at += THREADS) {
        let logit = logits[row * params.vocab + first + at];
        chunk[at] = select(0.0, capped(logit), is_finite(logit));
        alarm = select(ALARM, alarm, is_finite(logit));
    }
    for (var i = thread; i < CHUNK / 2u; i += THREADS) {
        atomicStore(&times[i], 0u);
    }
    workgroupBarrier();
    for (var i = thread; i < params.suppressed_count; i += THREADS) {
        let at = biases[i].id - first;
        if (at < count) {
            chunk[at] = LOWEST;
        }
    }
    count_recent(slot, first, count, thread);
    workgroupBarrier();

    var mine = Best(LOWEST, first);
    for (var at = thread; at < count; at += THREADS) {
        store_own(row * params.vocab + first + at, chunk[at]);
        mine = better(mine, Best(chunk[at], first + at));
    }
    let own = workgroup_best(mine, thread);
    var sum = alarm;
    for (var at = thread; at < count; at += THREADS) {
        sum += exp(chunk[at] - own.value);
        chunk[at] = penalised(chunk[at], at);
    }
    sum = workgroup_sum(sum, thread);
    for (var i = thread; i < settings.bias_count; i += THREADS) {
        let bias = biases[params.suppressed_count + slot * params.most_biases + i];
        if (bias.id - first < count) {
            chunk[bias.id - first] += bias.value;
        }
    }
    workgroupBarrier();

    mine = Best(LOWEST, first);
    for (var at = thread; at < count; at += THREADS) {
        let value = select(LOWEST, chunk[at], is_allowed(row, first + at));
        store_penalised(row * params.vocab + first + at, value);
        mine = better(mine, Best(value, first + at));
    }
    let best = workgroup_best(mine, thread);
    if (thread == 0u) {
        partials[row * groups.x + group.x] = Partial(best, own_logit(best.id), own, sum);
    }
}
