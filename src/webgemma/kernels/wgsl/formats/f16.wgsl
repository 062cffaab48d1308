// F16: a weight is a float16, two in a word.

const UNIT: u32 = 4u;

@group(0) @binding(1) var<storage, read> W: array<vec2<u32>>;

// stored: four weights as they are; opened: as floats.
fn stored(row: u32, unit: u32) -> vec4<u32> {
    return vec4(W[row * params.row_blocks / UNIT + unit], 0u, 0u);
}

fn opened(four: vec4<u32>) -> vec4<f32> {
    return vec4(unpack2x16float(four.x), unpack2x16float(four.y));
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 1> {
    return array<vec4<f32>, 1>(opened(stored(row, unit)));
}
