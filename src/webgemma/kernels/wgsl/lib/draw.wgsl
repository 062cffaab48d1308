// draw: `webgemma.sampler.draw` times 2^24, bit for bit.

fn mix_bits(x: u32) -> u32 {
    let a = (x ^ (x >> 16u)) * 0x7feb352du;
    let b = (a ^ (a >> 15u)) * 0x846ca68bu;
    return b ^ (b >> 16u);
}

fn draw(seed: vec2<u32>, step: u32) -> u32 {
    let x = mix_bits(seed.x ^ mix_bits(seed.y + 0x9e3779b9u));
    return mix_bits(x ^ mix_bits(step)) >> 8u;
}
