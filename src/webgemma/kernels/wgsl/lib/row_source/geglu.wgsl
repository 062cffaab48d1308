// source: four values of gelu(gate) * up, clamped to bounds; both may be slices of longer rows.
// uses: gelu clamped

struct Params {
    gate_stride: u32,
    up_stride: u32,
    up_first: u32,
    low: f32,
    high: f32,
}

var<storage, read> gate: array<vec4<f32>>;
var<storage, read> up: array<vec4<f32>>;

fn source(row: u32, i: u32) -> vec4<f32> {
    let g = gate[row * (params.gate_stride / 4u) + i];
    let u = up[(row * params.up_stride + params.up_first) / 4u + i];
    return clamped4(vec4(gelu(g.x), gelu(g.y), gelu(g.z), gelu(g.w)) * u, params.low, params.high);
}
