// source: four values of a row of x, clamped to bounds.
// uses: clamped

struct Params {
    width: u32,
    low: f32,
    high: f32,
}

var<storage, read> x: array<vec4<f32>>;

fn source(row: u32, i: u32) -> vec4<f32> {
    return clamped4(x[row * (params.width / 4u) + i], params.low, params.high);
}
