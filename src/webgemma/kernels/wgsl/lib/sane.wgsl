// is_sane: whether a logit is a number, or -inf, which makes a token impossible. Looks at the bits:
// WGSL may compare NaN and infinities as it likes.

fn is_sane(logit: f32) -> bool {
    let bits = bitcast<u32>(logit);
    return (bits & 0x7f800000u) != 0x7f800000u || bits == 0xff800000u;
}
