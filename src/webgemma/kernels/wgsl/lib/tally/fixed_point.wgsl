// Sums over tokens that are the same in any order: 64-bit integers, low word first, a token's
// exp(logit - best) in units of 2^-40.
// uses: token_order sampling_settings

override THREADS: u32;

struct Tally {
    count: u32,
    mass: vec2<u32>, // at temperature 1: what top_p is about
    share: vec2<u32>, // at the chosen temperature, of tokens that min_p keeps: what is drawn from
}

var<workgroup> sums: array<atomic<u32>, WORDS>; // BINS tallies, part by part

fn tally(value: f32, best: f32) -> Tally {
    let below = max(value - best, -1.0e30);
    let share = select(0.0, exp(below / settings.temperature), below >= settings.min_p_log);
    return Tally(1u, units(exp(below)), units(share));
}

fn units(e: f32) -> vec2<u32> {
    let scaled = min(e, 1.0) * 256.0;
    let high = floor(scaled);
    return vec2(u32((scaled - high) * 4294967296.0), u32(high));
}

fn clear_sums(thread: u32) {
    for (var i = thread; i < WORDS; i += THREADS) {
        atomicStore(&sums[i], 0u);
    }
}

fn add_to_sums(at: u32, value: f32, best: f32) {
    let one = tally(value, best);
    atomicAdd(&sums[at], 1u);
    add_wide(at + BINS, one.mass);
    add_wide(at + 3u * BINS, one.share);
}

fn add_wide(at: u32, x: vec2<u32>) {
    let low = atomicAdd(&sums[at], x.x);
    let high = x.y + select(0u, 1u, low + x.x < low);
    if (high > 0u) { // seldom: atomics are slow in software
        atomicAdd(&sums[at + BINS], high);
    }
}
