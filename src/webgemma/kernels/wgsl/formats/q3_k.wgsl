// Q3_K: 256 weights in 110 bytes. Group j of 16 weights: d * (scale[j] - 32) * (q - 4), d a
// float16, scales of 6 bits, q of 3. Bit k of byte i among 32 is the third bit of q[i + 32 k]; in
// each half of a block, byte i of 32 holds the low two of q[i], q[i + 32], q[i + 64], q[i + 96]. A
// unit is 64 weights, part p of the block: what half p / 2 keeps low (p even) or high (p odd) in
// its bytes. Planes: the third and the low bits of all blocks (32 + 64 bytes each), all scales (12
// bytes each), all d (2 bytes each).

struct Params {
    row_blocks: u32, // of a row
    plane1: u32, // where the second plane begins, in words
    plane2: u32, // where the third plane begins, in words
}

const UNIT: u32 = 64u;

var<storage, read> W: array<vec4<u32>>;

struct Words { // of a unit, as stored
    third_a: vec4<u32>,
    third_b: vec4<u32>,
    a: vec4<u32>,
    b: vec4<u32>,
    low: u32, // four bits of the scales
    high: u32, // two bits of the scales
    d: u32, // of two blocks
    odd: u32, // which of them
    part: u32,
}

fn words_of(row: u32, unit: u32) -> Words {
    let block = row * params.row_blocks + unit / 4u;
    let part = unit % 4u;
    let at = 6u * block + 2u + 2u * (part / 2u);
    let low = params.plane1 + 3u * block + part % 2u; // in words
    let high = params.plane1 + 3u * block + 2u;
    let d = params.plane2 + block / 2u;
    return Words(
        W[6u * block],
        W[6u * block + 1u],
        W[at],
        W[at + 1u],
        W[low / 4u][low % 4u],
        W[high / 4u][high % 4u],
        W[d / 4u][d % 4u],
        block % 2u,
        part,
    );
}

// Of the four groups of a part: d * (scale - 32). Byte j < 8 holds the low four bits of the scales
// j and j + 8, byte 8 + j the high two of the scales j, j + 4, j + 8 and j + 12.
fn group_scales(words: Words) -> vec4<f32> {
    let low = (words.low >> (4u * (words.part / 2u))) & 0x0f0f0f0fu;
    let high = (words.high >> (2u * words.part)) & 0x03030303u;
    let d = unpack2x16float(words.d)[words.odd];
    return d * (vec4<f32>(unpack4xU8(low | (high << 4u))) - 32.0);
}

// q - 4 without a borrow between the four bytes of a word.
fn centred(low: vec4<u32>, high: vec4<u32>) -> vec4<u32> {
    let q = (low & vec4(0x03030303u)) | ((high & vec4(0x01010101u)) << vec4(2u));
    return (q + 0x7c7c7c7cu) ^ vec4(0x80808080u);
}

// q - 4 of a part, as signed bytes in order.
fn quants(words: Words) -> array<vec4<u32>, 4> {
    let high_a = words.third_a >> vec4(2u * words.part);
    let high_b = words.third_b >> vec4(2u * words.part);
    let a = words.a >> vec4(4u * (words.part % 2u));
    let b = words.b >> vec4(4u * (words.part % 2u));
    return array<vec4<u32>, 4>(
        centred(a, high_a),
        centred(b, high_b),
        centred(a >> vec4(2u), high_a >> vec4(1u)),
        centred(b >> vec4(2u), high_b >> vec4(1u)),
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
