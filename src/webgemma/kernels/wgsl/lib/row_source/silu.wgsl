// source: four values of silu(x), clamped to bounds before, and to other bounds after.
// uses: silu clamped

struct Params {
    width: u32,
    x_low: f32,
    x_high: f32,
    low: f32,
    high: f32,
}

var<storage, read> x: array<vec4<f32>>;

fn source(row: u32, i: u32) -> vec4<f32> {
    let values = clamped4(x[row * (params.width / 4u) + i], params.x_low, params.x_high);
    return clamped4(silu(values), params.low, params.high);
}
