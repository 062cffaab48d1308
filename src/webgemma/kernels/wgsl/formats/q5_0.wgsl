// Q5_0: 32 weights are d * (q - 16), d a float16, q of 5 bits: byte j holds the low four of q[j]
// below and of q[j + 16] above; bit i of a word is the fifth of q[i]. Planes: the low bits of all
// blocks (16 bytes each), all fifth bits (4 bytes each), all d (2 bytes each).

struct Params {
    row_blocks: u32, // of a row
    plane1: u32, // where the second plane begins, in words
    plane2: u32, // where the third plane begins, in words
}

const UNIT: u32 = 32u;

var<storage, read> W: array<vec4<u32>>;

struct Words { // of a unit, as stored
    q: vec4<u32>,
    fifth: u32,
    d: u32, // of two blocks
    odd: u32, // which of them
}

fn words_of(row: u32, unit: u32) -> Words {
    let block = row * params.row_blocks + unit;
    let fifth = params.plane1 + block; // in words
    let d = params.plane2 + block / 2u;
    return Words(W[block], W[fifth / 4u][fifth % 4u], W[d / 4u][d % 4u], block % 2u);
}

fn block_scale(words: Words) -> f32 {
    return unpack2x16float(words.d)[words.odd];
}

// Bits 0 to 15 as the fifth bits of sixteen bytes.
fn fifth_bits(bits: u32) -> vec4<u32> {
    let nibbles = (vec4(bits) >> vec4(0u, 4u, 8u, 12u)) & vec4(15u);
    let spread = (nibbles * 0x00204081u) & vec4(0x01010101u); // bit k of a nibble to byte k
    return spread << vec4(4u);
}

// q - 16 without a borrow between the four bytes of a word.
fn centred(q: vec4<u32>) -> vec4<u32> {
    return (q + 0x70707070u) ^ vec4(0x80808080u);
}

// q - 16 of a block, as signed bytes in order.
fn quants(words: Words) -> array<vec4<u32>, 2> {
    let packed = words.q;
    return array<vec4<u32>, 2>(
        centred((packed & vec4(0x0f0f0f0fu)) | fifth_bits(words.fifth)),
        centred(((packed >> vec4(4u)) & vec4(0x0f0f0f0fu)) | fifth_bits(words.fifth >> 16u)),
    );
}

fn weights_of(words: Words) -> array<vec4<f32>, 8> {
    let d = block_scale(words);
    let q = quants(words);
    var out: array<vec4<f32>, 8>;
    for (var i = 0u; i < 4u; i++) {
        out[i] = d * vec4<f32>(unpack4xI8(q[0][i]));
        out[i + 4u] = d * vec4<f32>(unpack4xI8(q[1][i]));
    }
    return out;
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 8> {
    return weights_of(words_of(row, unit));
}

// For products of integers. One scale for each group of 32 activations.
const SCALED: u32 = 32u; // weights that share a scale
const OFFSETS: bool = false;

fn integer_unit(words: Words) -> array<Weights, 1> {
    let q = quants(words);
    return array<Weights, 1>(Weights(q[0], q[1], vec4(block_scale(words))));
}
