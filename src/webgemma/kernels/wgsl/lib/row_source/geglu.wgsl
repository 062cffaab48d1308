// source: four values of gelu(gate) * up, clamped to bounds; both may be slices of longer rows. The products that they
// come from may leave their sums over GATE_SPLITS and UP_SPLITS parts of k, one after the other.
// uses: gelu clamped

struct Params {
    gate_stride: u32,
    up_stride: u32,
    up_first: u32,
    low: f32,
    high: f32,
}

override GATE_SPLITS: u32 = 1u;
override UP_SPLITS: u32 = 1u;

var<storage, read> gate: array<vec4<f32>>;
var<storage, read> up: array<vec4<f32>>;

fn source(row: u32, i: u32) -> vec4<f32> {
    let gate_at = row * (params.gate_stride / 4u) + i;
    let up_at = (row * params.up_stride + params.up_first) / 4u + i;
    var g = gate[gate_at];
    var u = up[up_at];
    for (var split = 1u; split < GATE_SPLITS; split++) {
        g += gate[split * (arrayLength(&gate) / GATE_SPLITS) + gate_at];
    }
    for (var split = 1u; split < UP_SPLITS; split++) {
        u += up[split * (arrayLength(&up) / UP_SPLITS) + up_at];
    }
    return clamped4(vec4(gelu(g.x), gelu(g.y), gelu(g.z), gelu(g.w)) * u, params.low, params.high);
}
