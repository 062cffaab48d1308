// F32: a weight is a float.

const UNIT: u32 = 4u; // weights that one call of decode gives

@group(0) @binding(1) var<storage, read> W: array<vec4<f32>>;

alias Words = vec4<u32>; // of a unit, as they lie in memory

fn words_of(row: u32, unit: u32) -> Words {
    return bitcast<vec4<u32>>(W[row * params.row_blocks / UNIT + unit]);
}

fn opened(four: Words) -> vec4<f32> {
    return bitcast<vec4<f32>>(four);
}

fn weights_of(words: Words) -> array<vec4<f32>, 1> {
    return array<vec4<f32>, 1>(opened(words));
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 1> {
    return weights_of(words_of(row, unit));
}
