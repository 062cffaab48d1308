// F32: a weight is a float.

const UNIT: u32 = 4u; // weights that one call of decode gives

@group(0) @binding(1) var<storage, read> W: array<vec4<f32>>;

// stored: four weights as they are; opened: as floats.
fn stored(row: u32, unit: u32) -> vec4<u32> {
    return bitcast<vec4<u32>>(W[row * params.row_blocks / UNIT + unit]);
}

fn opened(four: vec4<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(four);
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 1> {
    return array<vec4<f32>, 1>(W[row * params.row_blocks / UNIT + unit]);
}
