// Q5_K: 256 weights in 176 bytes: float16 d and m, eight 6-bit scales and minima in 12 bytes, 32
// bytes of fifth bits, 128 bytes of the low four bits. Group j of 32 weights:
// d * scale[j] * q - m * minimum[j]; the fifth bit of its weight i is bit j of byte i. A unit is
// two groups, part p of the block: the low and the high halves of the same 32 bytes.

struct Params {
    row_blocks: u32, // of a row
}

const UNIT: u32 = 64u;

var<storage, read> W: array<vec4<u32>>;

struct Words { // of a unit, as stored
    head: vec4<u32>,
    fifth_a: vec4<u32>,
    fifth_b: vec4<u32>,
    a: vec4<u32>,
    b: vec4<u32>,
    part: u32,
}

fn words_of(row: u32, unit: u32) -> Words {
    let block = row * params.row_blocks + unit / 4u;
    let part = unit % 4u;
    let at = 11u * block;
    let low = at + 3u + 2u * part;
    return Words(W[at], W[at + 1u], W[at + 2u], W[low], W[low + 1u], part);
}

// Of both groups of a part: (d * scale, -m * minimum). Bytes 0 to 3 hold the scales 0 to 3, bytes 4
// to 7 the minima; bytes 8 to 11 the low four bits of those of the groups 4 to 7, whose high two
// bits are the top bits of bytes 0 to 7.
fn scales_and_offsets(words: Words) -> array<vec2<f32>, 2> {
    let bytes = words.head.yzw >> vec3(16u * (words.part % 2u));
    var pair = bytes.xy & vec2(0x3f3fu);
    if (words.part >= 2u) {
        let high = (bytes.xy >> vec2(2u)) & vec2(0x3030u);
        pair = (vec2(bytes.z, bytes.z >> 4u) & vec2(0x0f0fu)) | high;
    }
    let d = unpack2x16float(words.head.x) * vec2(1.0, -1.0);
    return array<vec2<f32>, 2>(
        d * vec2<f32>(pair & vec2(255u)),
        d * vec2<f32>(pair >> vec2(8u)),
    );
}

fn joined(low: vec4<u32>, high: vec4<u32>) -> vec4<u32> {
    return (low & vec4(0x0f0f0f0fu)) | ((high & vec4(0x01010101u)) << vec4(4u));
}

// q of a part, as bytes in order.
fn quants(words: Words) -> array<vec4<u32>, 4> {
    let high_a = words.fifth_a >> vec4(2u * words.part);
    let high_b = words.fifth_b >> vec4(2u * words.part);
    return array<vec4<u32>, 4>(
        joined(words.a, high_a),
        joined(words.b, high_b),
        joined(words.a >> vec4(4u), high_a >> vec4(1u)),
        joined(words.b >> vec4(4u), high_b >> vec4(1u)),
    );
}

fn weights_of(words: Words) -> array<vec4<f32>, 16> {
    let s = scales_and_offsets(words);
    let q = quants(words);
    var out: array<vec4<f32>, 16>;
    for (var i = 0u; i < 4u; i++) {
        out[i] = s[0].x * vec4<f32>(unpack4xU8(q[0][i])) + s[0].y;
        out[i + 4u] = s[0].x * vec4<f32>(unpack4xU8(q[1][i])) + s[0].y;
        out[i + 8u] = s[1].x * vec4<f32>(unpack4xU8(q[2][i])) + s[1].y;
        out[i + 12u] = s[1].x * vec4<f32>(unpack4xU8(q[3][i])) + s[1].y;
    }
    return out;
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 16> {
    return weights_of(words_of(row, unit));
}

// For products of integers. One scale and one offset for each group of 32 activations, two groups in a unit.
const SCALED: u32 = 32u; // weights that share a scale
const OFFSETS: bool = true;

fn integer_unit(words: Words) -> array<Weights, 2> {
    let q = quants(words);
    let s = scales_and_offsets(words);
    return array<Weights, 2>(
        Weights(q[0], q[1], s[0].xxyy),
        Weights(q[2], q[3], s[1].xxyy),
    );
}
