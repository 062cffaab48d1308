// source: four values of a row of x.

struct Params {
    width: u32,
}

var<storage, read> x: array<vec4<f32>>;

fn source(row: u32, i: u32) -> vec4<f32> {
    return x[row * (params.width / 4u) + i];
}
