// BF16: a weight is the upper half of a float32, two in a word.

struct Params {
    row_blocks: u32, // weights of a row
}

const UNIT: u32 = 4u;

var<storage, read> W: array<vec2<u32>>;

alias Words = vec4<u32>; // of a unit, as stored

fn words_of(row: u32, unit: u32) -> Words {
    return vec4(W[row * params.row_blocks / UNIT + unit], 0u, 0u);
}

fn floats_of(words: Words) -> vec4<f32> {
    let even = bitcast<vec2<f32>>(words.xy << vec2(16u));
    let odd = bitcast<vec2<f32>>(words.xy & vec2(0xffff0000u));
    return vec4(even.x, odd.x, even.y, odd.y);
}

fn weights_of(words: Words) -> array<vec4<f32>, 1> {
    return array<vec4<f32>, 1>(floats_of(words));
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 1> {
    return weights_of(words_of(row, unit));
}
