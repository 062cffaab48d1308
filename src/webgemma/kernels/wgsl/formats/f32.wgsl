// F32: a weight is a float.

struct Params {
    row_blocks: u32, // weights of a row
}

const UNIT: u32 = 4u; // weights that one call of decode returns

var<storage, read> W: array<vec4<f32>>;

alias Words = vec4<u32>; // of a unit, as stored

fn words_of(row: u32, unit: u32) -> Words {
    return bitcast<vec4<u32>>(W[row * params.row_blocks / UNIT + unit]);
}

fn floats_of(words: Words) -> vec4<f32> {
    return bitcast<vec4<f32>>(words);
}

fn weights_of(words: Words) -> array<vec4<f32>, 1> {
    return array<vec4<f32>, 1>(floats_of(words));
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 1> {
    return weights_of(words_of(row, unit));
}
