// four_of: the i-th four values of row t of x, which are floats.

@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;

fn four_of(t: u32, i: u32) -> vec4<f32> {
    return x[t * params.fours + i];
}
