// BF16: a weight is the upper half of a float32, two in a word.

const UNIT: u32 = 4u;

@group(0) @binding(1) var<storage, read> W: array<vec2<u32>>;

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 1> {
    let four = W[row * params.row_blocks / UNIT + unit];
    let even = bitcast<vec2<f32>>(four << vec2(16u));
    let odd = bitcast<vec2<f32>>(four & vec2(0xffff0000u));
    return array<vec4<f32>, 1>(vec4(even.x, odd.x, even.y, odd.y));
}
