// Q8_0: 32 weights are d * q, d a float16, q an int8. Planes: the q of all blocks (32 bytes each),
// then all d (2 bytes each).

struct Params {
    row_blocks: u32, // of a row
    plane1: u32, // where the second plane begins, in words
}

const UNIT: u32 = 32u;

var<storage, read> W: array<vec4<u32>>;

struct Words { // of a unit, as stored
    a: vec4<u32>,
    b: vec4<u32>,
    d: u32, // of two blocks
    odd: u32, // which of them
}

fn words_of(row: u32, unit: u32) -> Words {
    let block = row * params.row_blocks + unit;
    let at = params.plane1 + block / 2u; // in words
    return Words(W[2u * block], W[2u * block + 1u], W[at / 4u][at % 4u], block % 2u);
}

fn block_scale(words: Words) -> f32 {
    return unpack2x16float(words.d)[words.odd];
}

// q of a block, as signed bytes in order.
fn quants(words: Words) -> array<vec4<u32>, 2> {
    return array<vec4<u32>, 2>(words.a, words.b);
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
