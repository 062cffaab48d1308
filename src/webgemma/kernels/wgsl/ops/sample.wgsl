// The token at the fraction u of the remaining probability, the likeliest first. One workgroup in all.
// Every question (which is the k-th, where does top_p end, whose share holds u) is the same one: which token
// holds `goal` of a running sum. The bins say in which bin it is; in a crowded bin, byte after byte of
// (ordinal, id), the tallies of 256 groups say in which group; the last few tokens are counted one by one.
// uses: random partials tally token_order sampling_settings token_output

struct Params {
    parts: u32, // chunks of the vocabulary
}

override THREADS: u32;

var<storage, read> partials: array<Partial>;
var<storage, read> values: array<vec2<f32>>; // penalised, own
var<storage, read> bins: array<u32>;
var<storage, read> items: array<vec2<u32>>; // ordinal, id

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
    bytes: vec2<u32>, // of (ordinal, id), as far as the mask says
    mask: vec2<u32>,
}

var<workgroup> running: array<Tally, BINS>;
var<workgroup> last_index: atomic<u32>;
var<workgroup> narrowed: Group;
var<workgroup> few: array<vec2<u32>, FEW>;
var<workgroup> few_count: atomic<u32>;
var<workgroup> found_id: u32;

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

fn byte_of(item: vec2<u32>, level: u32) -> u32 {
    if (level < 4u) {
        return extractBits(item.x, 24u - 8u * level, 8u);
    }
    return extractBits(item.y, 48u - 8u * level, 8u); // ids have three bytes
}

// A byte at its position in (ordinal, id).
fn shifted(byte: u32, level: u32) -> vec2<u32> {
    if (level < 4u) {
        return vec2(byte << (24u - 8u * level), 0u);
    }
    return vec2(0u, byte << (48u - 8u * level));
}

fn agrees(item: vec2<u32>, known: Prefix) -> bool {
    return all(((item ^ known.bytes) & known.mask) == vec2(0u));
}

// The tally of items first..end that agree with `known` and whose next byte is `thread`.
fn by_byte(level: u32, known: Prefix, first: u32, end: u32, best: f32, thread: u32) -> Tally {
    clear_sums(thread);
    workgroupBarrier();
    for (var i = first + thread; i < end; i += THREADS) {
        let item = items[i];
        if (agrees(item, known)) {
            add_to_sums(byte_of(item, level), bitcast<f32>(ordinal(item.x)), best);
        }
    }
    workgroupBarrier();
    return Tally(
        atomicLoad(&sums[thread]),
        vec2(atomicLoad(&sums[thread + BINS]), atomicLoad(&sums[thread + 2u * BINS])),
        vec2(atomicLoad(&sums[thread + 3u * BINS]), atomicLoad(&sums[thread + 4u * BINS])),
    );
}

// Collects the at most FEW items first..end that agree with `known` in `few` and `running`.
fn collect(known: Prefix, first: u32, end: u32, best: f32, thread: u32) {
    if (thread == 0u) {
        atomicStore(&few_count, 0u);
    }
    workgroupBarrier();
    for (var i = first + thread; i < end; i += THREADS) {
        let item = items[i];
        if (agrees(item, known)) {
            let at = min(atomicAdd(&few_count, 1u), FEW - 1u);
            few[at] = item;
            running[at] = tally(bitcast<f32>(ordinal(item.x)), best);
        }
    }
    workgroupBarrier();
}

// The item of this thread as a group, after all likelier of the `count` few and after `before`.
fn ranked(before: Tally, count: u32, thread: u32) -> Group {
    var mine = Group(before, Tally(), 0u);
    if (thread < count) {
        let item = few[thread];
        for (var i = 0u; i < count; i++) {
            if (few[i].x < item.x || (few[i].x == item.x && few[i].y < item.y)) {
                mine.before = plus(mine.before, running[i]);
                mine.index += 1u;
            }
        }
        mine.own = running[thread];
    }
    return mine;
}

// The token in which the running sum passes `goal`, as a group of one; `found_id` becomes its id.
fn find(kind: u32, goal: vec2<u32>, bin: Group, best: f32, thread: u32) -> Group {
    var group = narrow(kind, goal, bin, thread);
    let first = group.before.count;
    let end = first + group.own.count;
    var known = Prefix();
    var level = 0u;
    while (group.own.count > FEW && level < 7u) {
        let own = by_byte(level, known, first, end, best, thread);
        group = narrow(kind, goal, lined_up(group.before, own, thread), thread);
        known.bytes |= shifted(group.index, level);
        known.mask |= shifted(255u, level);
        level += 1u;
    }
    collect(known, first, end, best, thread);
    let mine = ranked(group.before, group.own.count, thread);
    group = narrow(kind, goal, mine, thread);
    if (mine.own.count > 0u && mine.index == group.index) {
        found_id = few[thread].y;
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

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    let best = best_penalised(params.parts, thread).value;
    let total = log_total(params.parts, thread);
    let own = Tally(
        bins[thread],
        vec2(bins[thread + BINS], bins[thread + 2u * BINS]),
        vec2(bins[thread + 3u * BINS], bins[thread + 4u * BINS]),
    );
    let bin = lined_up(Tally(), own, thread);
    var kept = workgroupUniformLoad(&running[BINS - 1u]);
    if (settings.top_k > 0u && settings.top_k < kept.count) {
        let group = find(COUNT, vec2(settings.top_k - 1u, 0u), bin, best, thread);
        kept = plus(group.before, group.own);
    }
    if (settings.top_p < 1.0) {
        let group = find(MASS, decremented(scaled(kept.mass, settings.top_p)), bin, best, thread);
        kept = plus(group.before, group.own);
    }
    let u = f32(draw(settings.seed, batch.first + batch.count)) / 16777216.0;
    var goal = scaled(kept.share, u);
    if (!less(goal, kept.share)) { // rounded up
        goal = decremented(kept.share);
    }
    find(SHARE, goal, bin, best, thread);
    if (thread == 0u) {
        output_token(found_id, values[found_id].y - total);
    }
}
