// Powers of two that bring the largest value of a row between 2^14 and 2^15: float16 ends at 65504. power_of: that by
// which the row was divided, as bits of a float32; divisor_of: its inverse.

// A row below 2^-100 keeps fewer of its own bits.
fn power_of(peak: f32) -> u32 {
    return (max(bitcast<u32>(peak) >> 23u, 27u) - 14u) << 23u;
}

fn divisor_of(power: u32) -> f32 {
    return bitcast<f32>((254u << 23u) - power);
}

fn largest_of(values: vec4<f32>) -> f32 {
    let sizes = abs(values);
    return max(max(sizes.x, sizes.y), max(sizes.z, sizes.w));
}
