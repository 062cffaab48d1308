// Q5_1: 32 weights are d * q + m, d and m float16, q of 5 bits: byte j holds the low four of q[j]
// below and of q[j + 16] above; bit i of a word is the fifth of q[i]. Planes: the low bits of all
// blocks (16 bytes each), then d, m and the fifth bits of all blocks (8 bytes each).

struct Params {
    row_blocks: u32, // of a row
    plane1: u32, // where the second plane begins, in words
}

const UNIT: u32 = 32u;

var<storage, read> W: array<vec4<u32>>;

struct Words { // of a unit, as stored
    q: vec4<u32>,
    d: u32, // and m
    fifth: u32,
}

fn words_of(row: u32, unit: u32) -> Words {
    let block = row * params.row_blocks + unit;
    let at = params.plane1 + 2u * block; // in words, even: both are in one vec4
    return Words(W[block], W[at / 4u][at % 4u], W[at / 4u][at % 4u + 1u]);
}

fn scale_and_offset(words: Words) -> vec2<f32> {
    return unpack2x16float(words.d);
}

// Bits 0 to 15 as the fifth bits of sixteen bytes.
fn fifth_bits(bits: u32) -> vec4<u32> {
    let nibbles = (vec4(bits) >> vec4(0u, 4u, 8u, 12u)) & vec4(15u);
    let spread = (nibbles * 0x00204081u) & vec4(0x01010101u); // bit k of a nibble to byte k
    return spread << vec4(4u);
}

// q of a block, as bytes in order.
fn quants(words: Words) -> array<vec4<u32>, 2> {
    let packed = words.q;
    return array<vec4<u32>, 2>(
        (packed & vec4(0x0f0f0f0fu)) | fifth_bits(words.fifth),
        ((packed >> vec4(4u)) & vec4(0x0f0f0f0fu)) | fifth_bits(words.fifth >> 16u),
    );
}

fn weights_of(words: Words) -> array<vec4<f32>, 8> {
    let s = scale_and_offset(words);
    let q = quants(words);
    var out: array<vec4<f32>, 8>;
    for (var i = 0u; i < 4u; i++) {
        out[i] = s.x * vec4<f32>(unpack4xU8(q[0][i])) + s.y;
        out[i + 4u] = s.x * vec4<f32>(unpack4xU8(q[1][i])) + s.y;
    }
    return out;
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 8> {
    return weights_of(words_of(row, unit));
}

// For products of integers. One scale and one offset for each group of 32 activations.
const SCALED: u32 = 32u; // weights that share a scale
const OFFSETS: bool = true;

fn integer_unit(words: Words) -> array<Weights, 1> {
    let q = quants(words);
    return array<Weights, 1>(Weights(q[0], q[1], scale_and_offset(words).xxyy));
}
