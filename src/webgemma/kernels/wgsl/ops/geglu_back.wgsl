// The way back through h = gelu(gate) * up: d[r, i] = dh up gelu'(gate), d[r, width + i] = dh gelu(gate).
// gate and up may be slices of longer rows; a thread takes one i of a row r.

struct Params {
    width: u32,
    gate_stride: u32,
    up_stride: u32,
    up_first: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> gate: array<f32>;
@group(0) @binding(2) var<storage, read> up: array<f32>;
@group(0) @binding(3) var<storage, read> dh: array<f32>;
@group(0) @binding(4) var<storage, read_write> d: array<f32>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = group.x * THREADS + thread;
    if (i >= params.width) {
        return;
    }
    let row = group.z * groups.y + group.y;
    let bent = gelu_and_slope(gate[row * params.gate_stride + i]);
    let step = dh[row * params.width + i];
    let to = 2u * row * params.width + i;
    d[to] = step * up[row * params.up_stride + params.up_first + i] * bent.y;
    d[to + params.width] = step * bent.x;
}
