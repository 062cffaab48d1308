// seed_bits, then next_bits for each counter: `webgemma.sampler.bits`, bit for bit. draw: that module's
// `draw` times 2^24.

fn mix_bits(x: u32) -> u32 {
    let a = (x ^ (x >> 16u)) * 0x7feb352du;
    let b = (a ^ (a >> 15u)) * 0x846ca68bu;
    return b ^ (b >> 16u);
}

fn seed_bits(seed: vec2<u32>) -> u32 {
    return mix_bits(seed.x ^ mix_bits(seed.y + 0x9e3779b9u));
}

fn next_bits(x: u32, counter: u32) -> u32 {
    return mix_bits(x ^ mix_bits(counter));
}

fn draw(seed: vec2<u32>, step: u32) -> u32 {
    return next_bits(seed_bits(seed), step) >> 8u;
}
