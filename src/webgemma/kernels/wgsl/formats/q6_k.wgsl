// Q6_K: 256 weights in 210 bytes. Group j of 16 weights: d * scale[j] * (q - 32), d a float16,
// scales int8, q of 6 bits. In each half of a block, byte i of 64 holds the low four bits of q[i]
// and q[i + 64], byte i of 32 the high two of q[i], q[i + 32], q[i + 64] and q[i + 96]. A unit is
// 64 weights, part p of the block: what half p / 2 keeps low (p even) or high (p odd) in its bytes.
// Planes: the low bits, high bits and scales of all blocks (128 + 64 + 16 bytes each), then all d
// (2 bytes each).

struct Params {
    row_blocks: u32, // of a row
    plane1: u32, // where the second plane begins, in words
}

const UNIT: u32 = 64u;

var<storage, read> W: array<vec4<u32>>;

struct Words { // of a unit, as stored
    low: array<vec4<u32>, 4>,
    high_a: vec4<u32>,
    high_b: vec4<u32>,
    scales: u32,
    d: u32, // of two blocks
    odd: u32, // which of them
    part: u32,
}

fn words_of(row: u32, unit: u32) -> Words {
    let block = row * params.row_blocks + unit / 4u;
    let part = unit % 4u;
    let low = 13u * block + 4u * (part / 2u);
    let high = 13u * block + 8u + 2u * (part / 2u);
    let d = params.plane1 + block / 2u; // in words
    return Words(
        array<vec4<u32>, 4>(W[low], W[low + 1u], W[low + 2u], W[low + 3u]),
        W[high],
        W[high + 1u],
        W[13u * block + 12u][part],
        W[d / 4u][d % 4u],
        block % 2u,
        part,
    );
}

// Of the four groups of a part: d * scale.
fn group_scales(words: Words) -> vec4<f32> {
    return unpack2x16float(words.d)[words.odd] * vec4<f32>(unpack4xI8(words.scales));
}

// q - 32 without a borrow between the four bytes of a word.
fn centred(low: vec4<u32>, high: vec4<u32>) -> vec4<u32> {
    let q = (low & vec4(0x0f0f0f0fu)) | ((high & vec4(0x03030303u)) << vec4(4u));
    return (q + 0x60606060u) ^ vec4(0x80808080u);
}

// q - 32 of a part, as signed bytes in order.
fn quants(words: Words) -> array<vec4<u32>, 4> {
    let shift = vec4(4u * (words.part % 2u));
    let a = words.high_a >> shift;
    let b = words.high_b >> shift;
    return array<vec4<u32>, 4>(
        centred(words.low[0] >> shift, a),
        centred(words.low[1] >> shift, b),
        centred(words.low[2] >> shift, a >> vec4(2u)),
        centred(words.low[3] >> shift, b >> vec4(2u)),
    );
}

fn weights_of(words: Words) -> array<vec4<f32>, 16> {
    let s = group_scales(words);
    let q = quants(words);
    var out: array<vec4<f32>, 16>;
    for (var i = 0u; i < 4u; i++) {
        out[i] = s.x * vec4<f32>(unpack4xI8(q[0][i]));
        out[i + 4u] = s.y * vec4<f32>(unpack4xI8(q[1][i]));
        out[i + 8u] = s.z * vec4<f32>(unpack4xI8(q[2][i]));
        out[i + 12u] = s.w * vec4<f32>(unpack4xI8(q[3][i]));
    }
    return out;
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 16> {
    return weights_of(words_of(row, unit));
}

// For products of integers. One scale for each 16 activations, four in a unit.
const SCALED: u32 = 16u; // weights that share a scale
const OFFSETS: bool = false;

fn integer_unit(words: Words) -> array<Weights, 2> {
    let q = quants(words);
    let s = group_scales(words);
    return array<Weights, 2>(
        Weights(q[0], q[1], vec4(s.xy, 0.0, 0.0)),
        Weights(q[2], q[3], vec4(s.zw, 0.0, 0.0)),
    );
}
