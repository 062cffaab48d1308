// BF16: a weight is the upper half of a float32, two in a word.

const UNIT: u32 = 4u;

@group(0) @binding(1) var<storage, read> W: array<vec2<u32>>;

// stored: four weights as they are; opened: as floats.
fn stored(row: u32, unit: u32) -> vec4<u32> {
    return vec4(W[row * params.row_blocks / UNIT + unit], 0u, 0u);
}

fn opened(four: vec4<u32>) -> vec4<f32> {
    let even = bitcast<vec2<f32>>(four.xy << vec2(16u));
    let odd = bitcast<vec2<f32>>(four.xy & vec2(0xffff0000u));
    return vec4(even.x, odd.x, even.y, odd.y);
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 1> {
    return array<vec4<f32>, 1>(opened(stored(row, unit)));
}
