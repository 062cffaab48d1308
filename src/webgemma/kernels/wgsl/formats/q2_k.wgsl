// Q2_K: 256 weights in 84 bytes. Group j of 16 weights: d * scale[j] * q - m * minimum[j], d and m
// float16, q of 2 bits; byte j of 16 holds the scale below, the minimum above. In each half of a
// block, byte i of 32 holds q[i], q[i + 32], q[i + 64] and q[i + 96]. A unit is 64 weights, part p
// of the block: what half p / 2 keeps low (p even) or high (p odd) in its bytes. Planes: the scales
// and q of all blocks (16 + 64 bytes each), then all d and m (4 bytes each).

const UNIT: u32 = 64u;

@group(0) @binding(1) var<storage, read> W: array<vec4<u32>>;

// Of the four groups of a part: d * scale, and -m * minimum.
fn scales_and_offsets(block: u32, part: u32) -> array<vec4<f32>, 2> {
    let at = params.plane1 + block; // in words
    let d = unpack2x16float(W[at / 4u][at % 4u]);
    let bytes = W[5u * block][part];
    return array<vec4<f32>, 2>(
        d.x * vec4<f32>(unpack4xU8(bytes & 0x0f0f0f0fu)),
        -d.y * vec4<f32>(unpack4xU8((bytes >> 4u) & 0x0f0f0f0fu)),
    );
}

// q of a part, as bytes in order.
fn quants(block: u32, part: u32) -> array<vec4<u32>, 4> {
    let at = 5u * block + 1u + 2u * (part / 2u);
    let shift = vec4(4u * (part % 2u));
    let a = W[at] >> shift;
    let b = W[at + 1u] >> shift;
    let low = vec4(0x03030303u);
    return array<vec4<u32>, 4>(a & low, b & low, (a >> vec4(2u)) & low, (b >> vec4(2u)) & low);
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 16> {
    let block = row * params.row_blocks + unit / 4u;
    let s = scales_and_offsets(block, unit % 4u);
    let q = quants(block, unit % 4u);
    var out: array<vec4<f32>, 16>;
    for (var i = 0u; i < 4u; i++) {
        out[i] = s[0].x * vec4<f32>(unpack4xU8(q[0][i])) + s[1].x;
        out[i + 4u] = s[0].y * vec4<f32>(unpack4xU8(q[1][i])) + s[1].y;
        out[i + 8u] = s[0].z * vec4<f32>(unpack4xU8(q[2][i])) + s[1].z;
        out[i + 12u] = s[0].w * vec4<f32>(unpack4xU8(q[3][i])) + s[1].w;
    }
    return out;
}
