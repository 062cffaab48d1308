// y_four: four values of what is added to the residual, one row as it is; no sizes to know before.

@group(0) @binding(6) var<storage, read> y: array<vec4<f32>>;

fn y_sizes(at: u32, thread: u32) -> vec2<f32> {
    return vec2(1.0);
}

fn y_four(at: u32, i: u32, sizes: vec2<f32>) -> vec4<f32> {
    return y[at + i];
}
