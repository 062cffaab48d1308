// clamped and clamped4: clamp that keeps what is not finite. is_nan4: by the bits, since WGSL may compare NaN in any
// way, and lose it in min, max and clamp. A damaged weight has to reach the output, where it is noticed.

fn clamped(x: f32, low: f32, high: f32) -> f32 {
    return select(clamp(x, low, high), x, (bitcast<u32>(x) & 0x7f800000u) == 0x7f800000u);
}

fn clamped4(x: vec4<f32>, low: f32, high: f32) -> vec4<f32> {
    let broken = (bitcast<vec4<u32>>(x) & vec4(0x7f800000u)) == vec4(0x7f800000u);
    return select(clamp(x, vec4(low), vec4(high)), x, broken);
}

fn is_nan4(x: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(x) & vec4(0x7fffffffu)) > vec4(0x7f800000u);
}
