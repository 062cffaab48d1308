// store_vec4: four values of a row of h, quantised in the groups that integer_dot reads; `index` counts
// vec4s. All threads of a workgroup call it together, eight neighbours for a group: index and thread agree
// modulo 8, and all eight are live or none is.
// uses: integer_width eight_lanes

alias Stored = u32;

const GROUP_WORDS: u32 = 8u * BYTES + 4u;
const NOTHING: u32 = 0x0da24260u; // 1e-30: a group below it is 0, its scale would have no inverse

// As bits, floats from 0 on keep their order, and NaN is the largest: so its group's scale is NaN.
fn store_vec4(index: u32, values: vec4<f32>, live: bool, thread: u32) {
    let sizes = bitcast<vec4<u32>>(values) & vec4(0x7fffffffu);
    let bits = eight_max(max(max(sizes.x, sizes.y), max(sizes.z, sizes.w)), thread);
    let peak = bitcast<f32>(bits);
    let inverse = select(LARGEST / peak, 0.0, bits < NOTHING);
    let v = vec4<i32>(round(values * inverse));
    let sums = half_sums(v.x + v.y + v.z + v.w, thread);
    if (!live) {
        return;
    }
    let at = index / 8u * GROUP_WORDS;
    let j = index % 8u;
    if (BYTES == 1u) {
        h[at + j] = pack4xI8(v);
    } else {
        h[at + j] = pack4xI8((v + 128) >> vec4(8u));
        h[at + 8u + j] = pack4xI8(v); // its low bytes
    }
    if (j == 0u) {
        let scale = select(peak / LARGEST, 0.0, bits < NOTHING);
        let to = at + 8u * BYTES;
        h[to] = bitcast<u32>(scale);
        h[to + 1u] = bitcast<u32>(scale * f32(sums.x));
        h[to + 2u] = bitcast<u32>(scale * f32(sums.y));
        h[to + 3u] = 0u;
    }
}

// Four floats of h, which needs no other thread; `index` counts vec4s of floats.
fn store_floats(index: u32, values: vec4<f32>) {
    let words = bitcast<vec4<u32>>(values);
    for (var i = 0u; i < 4u; i++) {
        h[4u * index + i] = words[i];
    }
}
