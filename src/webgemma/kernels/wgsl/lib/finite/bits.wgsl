// is_finite: whether x is neither NaN nor an infinity. It tests the bits, since WGSL may compare such values
// in any way.

fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u;
}
