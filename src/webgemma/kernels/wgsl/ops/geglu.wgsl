// out[t, i] = gelu(gate[t, i]) * up[t, i]; both may be slices of longer rows.

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
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let i = group.x * THREADS + thread;
    if (i < params.width && t < state.count) {
        let u = up[t * params.up_stride + params.up_first + i];
        out[t * params.width + i] = gelu(gate[t * params.gate_stride + i]) * u;
    }
}
