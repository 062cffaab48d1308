// F32: a weight is a float.

const UNIT: u32 = 4u; // weights that one call of decode gives

@group(0) @binding(1) var<storage, read> W: array<vec4<f32>>;

alias Words = vec4<f32>; // of a unit

fn words_of(row: u32, unit: u32) -> Words {
    return W[row * params.row_blocks / UNIT + unit];
}

fn weights_of(words: Words) -> array<vec4<f32>, 1> {
    return array<vec4<f32>, 1>(words);
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 1> {
    return weights_of(words_of(row, unit));
}
