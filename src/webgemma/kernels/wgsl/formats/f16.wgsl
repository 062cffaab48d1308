// F16: a weight is a float16, two in a word.

const UNIT: u32 = 4u;

@group(0) @binding(1) var<storage, read> W: array<vec2<u32>>;

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 1> {
    let four = W[row * params.row_blocks / UNIT + unit];
    return array<vec4<f32>, 1>(vec4(unpack2x16float(four.x), unpack2x16float(four.y)));
}
