// source: four values of a row of x.

struct Params {
    stride: u32, // values of x from one row to the next
}

var<storage, read> x: array<vec4<f32>>;

fn source(row: u32, i: u32) -> vec4<f32> {
    return x[row * (params.stride / 4u) + i];
}
