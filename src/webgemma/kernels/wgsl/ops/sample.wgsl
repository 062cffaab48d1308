// The token at the fraction u of the remaining probability, the likeliest first. One workgroup for each row.
// Every question (which is the k-th, how far does typical_p reach, where does top_p end, whose share holds u) is
// the same one: which token holds `goal` of a running sum. The bins say in which bin it is; in a crowded bin, byte
// after byte of its key, the tallies of 256 groups say in which group; the last few are counted one by one.
// typical_p keeps the tokens whose surprisal is closest to its mean, the entropy: as the surprisal is a constant
// minus the logit, those whose logit is closest to the mean logit.
// uses: random partials tally token_order sampling_settings token_output workgroup_sum

struct Params {
    parts: u32, // chunks of the vocabulary
    vocab: u32,
}

override THREADS: u32;

var<storage, read> partials: array<Partial>;
var<storage, read> values: array<vec2<f32>>; // of each token of a row: penalised, own
var<storage, read> bins: array<u32>;
var<storage, read> items: array<vec2<u32>>; // of each token of a row: ordinal, id

const COUNT: u32 = 0u;
const MASS: u32 = 1u;
const SHARE: u32 = 2u;
const FEW: u32 = 128u;

struct Group {
    before: Tally, // of all likelier tokens
    own: Tally,
    index: u32, // among the groups it was chosen from
}

struct Prefix {
    bytes: vec2<u32>, // of a key, as far as the mask says
    mask: vec2<u32>,
}

// The tokens that remain of the first `end` items, and their order.
struct Window {
    end: u32, // 0: those of a bin
    last: vec2<u32>, // ordinal and id of the least likely
    mean: f32, // logit
    distance: f32, // from the mean, at most
    by_distance: bool, // the order: by distance from the mean, or the likeliest first
}

var<workgroup> running: array<Tally, BINS>;
var<workgroup> last_index: atomic<u32>;
var<workgroup> narrowed: Group;
var<workgroup> few: array<vec2<u32>, FEW>;
var<workgroup> few_count: atomic<u32>;
var<workgroup> found: vec2<u32>; // key, id
var<workgroup> own_slot: u32;

fn add(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn plus(a: Tally, b: Tally) -> Tally {
    return Tally(a.count + b.count, add(a.mass, b.mass), add(a.share, b.share));
}

fn less(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

fn measure(t: Tally, kind: u32) -> vec2<u32> {
    if (kind == COUNT) {
        return vec2(t.count, 0u);
    }
    if (kind == MASS) {
        return t.mass;
    }
    return t.share;
}

// The group of this thread, after those of lower threads and after `before`.
fn lined_up(before: Tally, own: Tally, thread: u32) -> Group {
    running[thread] = own;
    for (var step = 1u; step < BINS; step *= 2u) {
        workgroupBarrier();
        var sum = running[thread];
        if (thread >= step) {
            sum = plus(sum, running[thread - step]);
        }
        workgroupBarrier();
        running[thread] = sum;
    }
    workgroupBarrier();
    if (thread == 0u) {
        return Group(before, own, 0u);
    }
    return Group(plus(before, running[thread - 1u]), own, thread);
}

// Of all threads' groups the last that is not empty and begins at or before `goal`.
fn narrow(kind: u32, goal: vec2<u32>, mine: Group, thread: u32) -> Group {
    if (thread == 0u) {
        atomicStore(&last_index, 0u);
    }
    workgroupBarrier();
    let candidate = mine.own.count > 0u && !less(goal, measure(mine.before, kind));
    if (candidate) {
        atomicMax(&last_index, mine.index);
    }
    workgroupBarrier();
    if (candidate && mine.index == atomicLoad(&last_index)) {
        narrowed = mine;
    }
    return workgroupUniformLoad(&narrowed);
}

fn item_at(i: u32) -> vec2<u32> {
    return items[row * params.vocab + i];
}

fn value_of(item: vec2<u32>) -> f32 {
    return bitcast<f32>(ordinal(item.x));
}

fn precedes(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.x < b.x || (a.x == b.x && a.y < b.y);
}

fn remains(item: vec2<u32>, window: Window) -> bool {
    return !precedes(window.last, item) && abs(value_of(item) - window.mean) <= window.distance;
}

// What an item is ordered by: (ordinal, id), or (distance, id).
fn key_of(item: vec2<u32>, window: Window) -> vec2<u32> {
    return vec2(select(item.x, bitcast<u32>(abs(value_of(item) - window.mean)), window.by_distance), item.y);
}

fn byte_of(key: vec2<u32>, level: u32) -> u32 {
    if (level < 4u) {
        return extractBits(key.x, 24u - 8u * level, 8u);
    }
    return extractBits(key.y, 48u - 8u * level, 8u); // ids have three bytes
}

// A byte at its position in a key.
fn shifted(byte: u32, level: u32) -> vec2<u32> {
    if (level < 4u) {
        return vec2(byte << (24u - 8u * level), 0u);
    }
    return vec2(0u, byte << (48u - 8u * level));
}

fn agrees(key: vec2<u32>, known: Prefix) -> bool {
    return all(((key ^ known.bytes) & known.mask) == vec2(0u));
}

// The tally of items first..end that remain, whose key agrees with `known` and has `thread` as its next byte.
fn by_byte(
    level: u32,
    known: Prefix,
    first: u32,
    end: u32,
    window: Window,
    best: f32,
    thread: u32,
) -> Tally {
    clear_sums(thread);
    workgroupBarrier();
    for (var i = first + thread; i < end; i += THREADS) {
        let key = key_of(item_at(i), window);
        if (agrees(key, known) && remains(item_at(i), window)) {
            add_to_sums(byte_of(key, level), value_of(item_at(i)), best);
        }
    }
    workgroupBarrier();
    return Tally(
        atomicLoad(&sums[thread]),
        vec2(atomicLoad(&sums[thread + BINS]), atomicLoad(&sums[thread + 2u * BINS])),
        vec2(atomicLoad(&sums[thread + 3u * BINS]), atomicLoad(&sums[thread + 4u * BINS])),
    );
}

// Collects the at most FEW items first..end that remain and agree with `known`: keys in `few`, tallies in `running`.
fn collect(known: Prefix, first: u32, end: u32, window: Window, best: f32, thread: u32) {
    if (thread == 0u) {
        atomicStore(&few_count, 0u);
    }
    workgroupBarrier();
    for (var i = first + thread; i < end; i += THREADS) {
        let key = key_of(item_at(i), window);
        if (agrees(key, known) && remains(item_at(i), window)) {
            let at = min(atomicAdd(&few_count, 1u), FEW - 1u);
            few[at] = key;
            running[at] = tally(value_of(item_at(i)), best);
        }
    }
    workgroupBarrier();
}

// The key of this thread as a group, after all lower ones of the `count` few and after `before`.
fn ranked(before: Tally, count: u32, thread: u32) -> Group {
    var mine = Group(before, Tally(), 0u);
    if (thread < count) {
        for (var i = 0u; i < count; i++) {
            if (precedes(few[i], few[thread])) {
                mine.before = plus(mine.before, running[i]);
                mine.index += 1u;
            }
        }
        mine.own = running[thread];
    }
    return mine;
}

// The token in which the running sum passes `goal`, as a group of one; `found` becomes its key.
fn find(kind: u32, goal: vec2<u32>, bin: Group, window: Window, best: f32, thread: u32) -> Group {
    var group = narrow(kind, goal, bin, thread);
    let first = select(group.before.count, 0u, window.end > 0u);
    let end = select(first + group.own.count, window.end, window.end > 0u);
    var known = Prefix();
    var level = 0u;
    while (group.own.count > FEW && level < 7u) {
        let own = by_byte(level, known, first, end, window, best, thread);
        group = narrow(kind, goal, lined_up(group.before, own, thread), thread);
        known.bytes |= shifted(group.index, level);
        known.mask |= shifted(255u, level);
        level += 1u;
    }
    collect(known, first, end, window, best, thread);
    let mine = ranked(group.before, group.own.count, thread);
    group = narrow(kind, goal, mine, thread);
    if (mine.own.count > 0u && mine.index == group.index) {
        found = few[thread];
    }
    workgroupBarrier();
    return group;
}

fn scaled(x: vec2<u32>, factor: f32) -> vec2<u32> {
    let product = factor * (f32(x.y) * 4294967296.0 + f32(x.x));
    let high = floor(product / 4294967296.0);
    return vec2(u32(product - high * 4294967296.0), u32(high));
}

// x - 1, and 0 for 0.
fn decremented(x: vec2<u32>) -> vec2<u32> {
    if (x.x > 0u) {
        return vec2(x.x - 1u, x.y);
    }
    return select(vec2(0xffffffffu, x.y - 1u), vec2(0u), x.y == 0u);
}

// The mean of the logits that remain, weighted by probability, for logits below `best`.
fn mean_logit(window: Window, best: f32, thread: u32) -> f32 {
    var mass = 0.0;
    var moment = 0.0;
    for (var i = thread; i < window.end; i += THREADS) {
        if (remains(item_at(i), window)) {
            let below = value_of(item_at(i)) - best;
            mass += exp(below);
            moment += exp(below) * below;
        }
    }
    mass = workgroup_sum(mass, thread);
    return best + workgroup_sum(moment, thread) / mass;
}

// All that remain, as the group of the first thread.
fn joined(window: Window, best: f32, thread: u32) -> Group {
    let own = by_byte(0u, Prefix(), 0u, window.end, window, best, thread);
    lined_up(Tally(), own, thread);
    let total = workgroupUniformLoad(&running[BINS - 1u]);
    if (thread == 0u) {
        return Group(Tally(), total, 0u);
    }
    return Group(total, Tally(), thread);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    row = group.x;
    if (thread == 0u) {
        own_slot = slot_in(batch.rows[row]);
    }
    let slot = workgroupUniformLoad(&own_slot); // the compiler has to see that all threads agree
    let chosen = settings_table[slot];
    settings = chosen;
    var best = best_penalised(params.parts, thread).value;
    let total = log_total(params.parts, thread);
    let first = row * ROW_WORDS + thread;
    let own = Tally(
        bins[first],
        vec2(bins[first + BINS], bins[first + 2u * BINS]),
        vec2(bins[first + 3u * BINS], bins[first + 4u * BINS]),
    );
    var bin = lined_up(Tally(), own, thread);
    var kept = workgroupUniformLoad(&running[BINS - 1u]);
    var window = Window(0u, vec2(0xffffffffu), 0.0, 3.4e38, false);
    var last = window.last;
    if (chosen.top_k > 0u && chosen.top_k < kept.count) {
        let group = find(COUNT, vec2(chosen.top_k - 1u, 0u), bin, window, best, thread);
        last = workgroupUniformLoad(&found);
        kept = plus(group.before, group.own);
    }
    if (chosen.typical_p < 1.0) {
        let last_bin = narrow(COUNT, vec2(kept.count - 1u, 0u), bin, thread);
        window.end = last_bin.before.count + last_bin.own.count;
        window.last = last;
        window.mean = mean_logit(window, best, thread);
        window.by_distance = true;
        bin = joined(window, best, thread);
        find(MASS, decremented(scaled(kept.mass, chosen.typical_p)), bin, window, best, thread);
        window.distance = bitcast<f32>(workgroupUniformLoad(&found).x);
        window.by_distance = false;
        find(COUNT, vec2(0u), joined(window, best, thread), window, best, thread);
        best = value_of(workgroupUniformLoad(&found));
        bin = joined(window, best, thread);
        kept = workgroupUniformLoad(&running[BINS - 1u]);
    }
    if (chosen.top_p < 1.0) {
        let group = find(MASS, decremented(scaled(kept.mass, chosen.top_p)), bin, window, best, thread);
        kept = plus(group.before, group.own);
    }
    let u = f32(draw(chosen.seed, batch.conversations[slot].position + ahead_in(batch.rows[row]) + 1u)) / 16777216.0;
    var goal = scaled(kept.share, u);
    if (!less(goal, kept.share)) { // rounded up
        goal = decremented(kept.share);
    }
    find(SHARE, goal, bin, window, best, thread);
    if (thread == 0u) {
        output_token(slot, found.y, values[row * params.vocab + found.y].y - total);
    }
}
