// h = gelu(gate) up: dgate = dh up gelu'(gate), dup = dh gelu(gate), where
// gelu'(x) = ½ (1 + t + x (1 - t²) u'), t = tanh(u), u = √(2/π) (x + 0.044715 x³).
// Both may be slices of longer rows; dgate and dup are the halves of one. A thread takes one value.

struct Params {
    width: u32,
    gate_stride: u32,
    up_stride: u32,
    up_first: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> gate: array<f32>;
@group(0) @binding(3) var<storage, read> up: array<f32>;
@group(0) @binding(4) var<storage, read> dh: array<f32>;
@group(0) @binding(5) var<storage, read_write> dboth: array<f32>;

const ROOT: f32 = 0.7978845608028654; // √(2/π)

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = group.x * THREADS + thread;
    let t = group.y;
    if (i >= params.width || t >= state.count) {
        return;
    }
    let at = 2u * t * params.width + i;
    let x = gate[t * params.gate_stride + i];
    let bent = tanh(clamp(ROOT * (x + 0.044715 * x * x * x), -15.0, 15.0));
    let slope = 0.5 * (1.0 + bent + x * (1.0 - bent * bent) * ROOT * (1.0 + 0.134145 * x * x));
    let owed = dh[t * params.width + i];
    dboth[at] = owed * up[t * params.up_stride + params.up_first + i] * slope;
    dboth[at + params.width] = owed * 0.5 * x * (1.0 + bent);
}
