// IQ4_XS: 256 weights in 136 bytes. Group j of 32 weights: d * (scale[j] - 32) * value[q], d a
// float16, scales of 6 bits, q of 4: byte i of 16 holds q[i] below and q[i + 16] above. The sixteen
// values lie closer near zero: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113. A unit is
// a group. Planes: the q of all blocks (128 bytes each), then d and the scales of all blocks (8
// bytes each).

struct Params {
    row_blocks: u32, // of a row
    plane1: u32, // where the second plane begins, in words
}

const UNIT: u32 = 32u;

var<storage, read> W: array<vec4<u32>>;

struct Words { // of a unit, as stored
    q: vec4<u32>,
    d: u32, // and the high two bits of each scale, in its upper half
    low: u32, // four bits of each scale
    group: u32,
}

fn words_of(row: u32, unit: u32) -> Words {
    let block = row * params.row_blocks + unit / 8u;
    let at = params.plane1 + 2u * block; // in words, even: both are in one vec4
    let group = unit % 8u;
    return Words(W[8u * block + group], W[at / 4u][at % 4u], W[at / 4u][at % 4u + 1u], group);
}

fn group_scale(words: Words) -> f32 {
    let low = (words.low >> (4u * words.group)) & 15u;
    let high = (words.d >> (16u + 2u * words.group)) & 3u;
    return unpack2x16float(words.d).x * (f32(low | (high << 4u)) - 32.0);
}

// The value of the lowest four bits of each component, from the table above as bytes.
fn table_value(q: vec4<u32>) -> vec4<u32> {
    let upper = (q & vec4(4u)) != vec4(0u);
    let negative = select(vec4(0xbfad9881u), vec4(0xf6eaddcfu), upper);
    let positive = select(vec4(0x26190d01u), vec4(0x71594535u), upper);
    let four = select(negative, positive, (q & vec4(8u)) != vec4(0u));
    return (four >> ((q & vec4(3u)) * 8u)) & vec4(255u);
}

fn table_values(q: vec4<u32>) -> vec4<u32> {
    return table_value(q)
        | (table_value(q >> vec4(8u)) << vec4(8u))
        | (table_value(q >> vec4(16u)) << vec4(16u))
        | (table_value(q >> vec4(24u)) << vec4(24u));
}

// The values of a group, as signed bytes in order.
fn quants(words: Words) -> array<vec4<u32>, 2> {
    let packed = words.q;
    return array<vec4<u32>, 2>(table_values(packed), table_values(packed >> vec4(4u)));
}

fn weights_of(words: Words) -> array<vec4<f32>, 8> {
    let d = group_scale(words);
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
    return array<Weights, 1>(Weights(q[0], q[1], vec4(group_scale(words))));
}
