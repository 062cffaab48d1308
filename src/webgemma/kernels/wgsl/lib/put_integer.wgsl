// put_four: four values of a row of h, as integers in the groups that integer.wgsl reads; place
// counts the fours. All threads of a workgroup call it together, eight neighbours for a group:
// place and thread agree modulo 8, and all eight are live or none is.

alias Stored = u32;

const GROUP_WORDS: u32 = 8u * BYTES + 4u;
const NOTHING: u32 = 0x0da24260u; // 1e-30: a group below it is 0, its scale would have no inverse

// As bits, floats from 0 on keep their order, and NaN is the largest: so its group's scale is NaN.
fn put_four(place: u32, four: vec4<f32>, live: bool, thread: u32) {
    let size = bitcast<vec4<u32>>(four) & vec4(0x7fffffffu);
    let bits = eight_max(max(max(size.x, size.y), max(size.z, size.w)), thread);
    let peak = bitcast<f32>(bits);
    let inverse = select(LARGEST / peak, 0.0, bits < NOTHING);
    let v = vec4<i32>(round(four * inverse));
    let sums = four_sums(v.x + v.y + v.z + v.w, thread);
    if (!live) {
        return;
    }
    let at = place / 8u * GROUP_WORDS;
    let j = place % 8u;
    if (BYTES == 1u) {
        h[at + j] = pack4xI8(v);
    } else {
        h[at + j] = pack4xI8((v + 128) >> vec4(8u));
        h[at + 8u + j] = pack4xI8(v); // its low bytes
    }
    if (j == 0u) {
        let scale = select(peak / LARGEST, 0.0, bits < NOTHING);
        let sizes = at + 8u * BYTES;
        h[sizes] = bitcast<u32>(scale);
        h[sizes + 1u] = bitcast<u32>(scale * f32(sums.x));
        h[sizes + 2u] = bitcast<u32>(scale * f32(sums.y));
        h[sizes + 3u] = 0u;
    }
}

// Four floats of h, which needs no other thread; place counts fours of floats.
fn put_floats(place: u32, four: vec4<f32>) {
    let words = bitcast<vec4<u32>>(four);
    for (var i = 0u; i < 4u; i++) {
        h[4u * place + i] = words[i];
    }
}
