// Q2_K: 256 weights in 84 bytes. Group j of 16 weights: d * scale[j] * q - m * minimum[j], d and m
// float16, q of 2 bits; byte j of 16 holds the scale below, the minimum above. In each half of a
// block, byte i of 32 holds q[i], q[i + 32], q[i + 64] and q[i + 96]. A unit is 64 weights, part p
// of the block: what half p / 2 keeps low (p even) or high (p odd) in its bytes. Planes: the scales
// and q of all blocks (16 + 64 bytes each), then all d and m (4 bytes each).

struct Params {
    row_blocks: u32, // of a row
    plane1: u32, // where the second plane begins, in words
}

const UNIT: u32 = 64u;

var<storage, read> W: array<vec4<u32>>;

struct Words { // of a unit, as stored
    scales: u32,
    a: vec4<u32>,
    b: vec4<u32>,
    d: u32, // and m
    part: u32,
}

fn words_of(row: u32, unit: u32) -> Words {
    let block = row * params.row_blocks + unit / 4u;
    let part = unit % 4u;
    let at = 5u * block + 1u + 2u * (part / 2u);
    let d = params.plane1 + block; // in words
    return Words(W[5u * block][part], W[at], W[at + 1u], W[d / 4u][d % 4u], part);
}

// Of the four groups of a part: d * scale, and -m * minimum.
fn scales_and_offsets(words: Words) -> array<vec4<f32>, 2> {
    let d = unpack2x16float(words.d);
    let bytes = words.scales;
    return array<vec4<f32>, 2>(
        d.x * vec4<f32>(unpack4xU8(bytes & 0x0f0f0f0fu)),
        -d.y * vec4<f32>(unpack4xU8((bytes >> 4u) & 0x0f0f0f0fu)),
    );
}

// q of a part, as bytes in order.
fn quants(words: Words) -> array<vec4<u32>, 4> {
    let shift = vec4(4u * (words.part % 2u));
    let a = words.a >> shift;
    let b = words.b >> shift;
    let low = vec4(0x03030303u);
    return array<vec4<u32>, 4>(a & low, b & low, (a >> vec4(2u)) & low, (b >> vec4(2u)) & low);
}

fn weights_of(words: Words) -> array<vec4<f32>, 16> {
    let s = scales_and_offsets(words);
    let q = quants(words);
    var out: array<vec4<f32>, 16>;
    for (var i = 0u; i < 4u; i++) {
        out[i] = s[0].x * vec4<f32>(unpack4xU8(q[0][i])) + s[1].x;
        out[i + 4u] = s[0].y * vec4<f32>(unpack4xU8(q[1][i])) + s[1].y;
        out[i + 8u] = s[0].z * vec4<f32>(unpack4xU8(q[2][i])) + s[1].z;
        out[i + 12u] = s[0].w * vec4<f32>(unpack4xU8(q[3][i])) + s[1].w;
    }
    return out;
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 16> {
    return weights_of(words_of(row, unit));
}

// For products of integers. One scale and one offset for each 16 activations, four in a unit.
const SCALED: u32 = 16u; // weights that share a scale
const OFFSETS: bool = true;

fn integer_unit(words: Words) -> array<Weights, 2> {
    let q = quants(words);
    let s = scales_and_offsets(words);
    return array<Weights, 2>(
        Weights(q[0], q[1], vec4(s[0].xy, s[1].xy)),
        Weights(q[2], q[3], vec4(s[0].zw, s[1].zw)),
    );
}
