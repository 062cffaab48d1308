// is_finite: whether x is neither NaN nor an infinity. It looks at the bits, since WGSL may compare such
// values as it likes.

fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u;
}
