// quantised: four values of a group of 32 as integers, in the form that integer_dot reads. All threads of a workgroup
// call it together, eight neighbours for a group.
// uses: integer_width eight_lanes

const NOTHING: u32 = 0x0da24260u; // 1e-30: a group below it is 0, its scale would have no inverse

struct Quantised {
    high: u32, // four bytes; all of the values with BYTES 1
    low: u32,
    scale: f32, // of the group
    sums: vec2<f32>, // of the group's first sixteen values and of its last
}

// As bits, floats from 0 on keep their order, and NaN is the largest: so its group's scale is NaN.
fn quantised(values: vec4<f32>, thread: u32) -> Quantised {
    let sizes = bitcast<vec4<u32>>(values) & vec4(0x7fffffffu);
    let bits = eight_max(max(max(sizes.x, sizes.y), max(sizes.z, sizes.w)), thread);
    let peak = bitcast<f32>(bits);
    let inverse = select(LARGEST / peak, 0.0, bits < NOTHING);
    let v = vec4<i32>(round(values * inverse));
    let sums = half_sums(v.x + v.y + v.z + v.w, thread);
    let scale = select(peak / LARGEST, 0.0, bits < NOTHING);
    let low = pack4xI8(v); // the low bytes of each
    let high = select(low, pack4xI8((v + 128) >> vec4(8u)), BYTES == 2u);
    return Quantised(high, low, scale, scale * vec2<f32>(sums));
}
