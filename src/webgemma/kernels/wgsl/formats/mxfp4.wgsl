// MXFP4: 32 weights are 2^(e - 128) * value[q], e a byte, q of 4 bits: byte j holds q[j] below and
// q[j + 16] above. The values are floats of 4 bits, doubled to be whole: 0 1 2 3 4 6 8 12, then the
// same negative. Planes: the q of all blocks (16 bytes each), then all e (1 byte each).

struct Params {
    row_blocks: u32, // of a row
    plane1: u32, // where the second plane begins, in words
}

const UNIT: u32 = 32u;

var<storage, read> W: array<vec4<u32>>;

struct Words { // of a unit, as stored
    q: vec4<u32>,
    e: u32, // of four blocks
    shift: u32, // to this block's
}

fn words_of(row: u32, unit: u32) -> Words {
    let block = row * params.row_blocks + unit;
    let at = params.plane1 + block / 4u; // in words
    return Words(W[block], W[at / 4u][at % 4u], 8u * (block % 4u));
}

fn block_scale(words: Words) -> f32 {
    let e = (words.e >> words.shift) & 255u;
    // below 2^-126 a float32 has no exponent left, only a fraction
    return bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << e, e < 2u));
}

// The value of the lowest four bits of each component, from the table above as bytes.
fn table_value(q: vec4<u32>) -> vec4<u32> {
    let large = (q & vec4(4u)) != vec4(0u);
    let positive = select(vec4(0x03020100u), vec4(0x0c080604u), large);
    let negative = select(vec4(0xfdfeff00u), vec4(0xf4f8fafcu), large);
    let four = select(positive, negative, (q & vec4(8u)) != vec4(0u));
    return (four >> ((q & vec4(3u)) * 8u)) & vec4(255u);
}

fn table_values(q: vec4<u32>) -> vec4<u32> {
    return table_value(q)
        | (table_value(q >> vec4(8u)) << vec4(8u))
        | (table_value(q >> vec4(16u)) << vec4(16u))
        | (table_value(q >> vec4(24u)) << vec4(24u));
}

// The values of a block, as signed bytes in order.
fn quants(words: Words) -> array<vec4<u32>, 2> {
    let packed = words.q;
    return array<vec4<u32>, 2>(table_values(packed), table_values(packed >> vec4(4u)));
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
