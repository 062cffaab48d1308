// The order of tokens, the likeliest first, and its division into bins.

override THREADS: u32;

const BINS: u32 = THREADS;
const BINS_PER_NAT: f32 = 4.0;
const WORDS: u32 = 5u * BINS; // of BINS tallies, stored part by part
const ROW_WORDS: u32 = 6u * BINS; // of a row of logits: with the items reserved in each bin

// The last bin also holds everything further below the best logit.
fn bin_of(value: f32, best: f32) -> u32 {
    return min(u32(min((best - value) * BINS_PER_NAT, f32(BINS))), BINS - 1u);
}

// Ascending ordinals are descending logits; it is its own inverse. -0 counts as 0.
fn ordinal(bits: u32) -> u32 {
    let sane = select(bits, 0u, bits == 0x80000000u);
    return select(~sane & 0x7fffffffu, sane, sane > 0x80000000u);
}
