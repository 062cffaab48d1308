// How a canvas is denoised, written by the host for each step; and a position's random bits.
// uses: random

struct Denoising {
    inverse_temperature: f32,
    entropy_bound: f32,
    confidence_threshold: f32,
    stability_threshold: u32,
    seed: vec2<u32>, // low and high half
    canvas: u32, // its number, from 0
    step: u32, // counted from 1
    steps: u32,
}

var<uniform> denoising: Denoising;

// `webgemma.denoising.position_bits`: sampling 0 or 1.
fn position_bits(position: u32, sampling: u32) -> u32 {
    let round = next_bits(next_bits(seed_bits(denoising.seed), denoising.canvas), denoising.step);
    return next_bits(round, 2u * position + sampling);
}
