// h[r, i] = gelu(gate[r, i]) * up[r, i]; both may be slices of longer rows. A token has as many rows r
// as the grid has layers. A thread takes four i; put_float or put_integer stores h.

struct Params {
    width: u32,
    gate_stride: u32,
    up_stride: u32,
    up_first: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> gate: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> up: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> h: array<Stored>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    if (group.y >= state.count) {
        return;
    }
    let row = group.y * groups.z + group.z;
    let fours = params.width / 4u;
    let i = group.x * THREADS + thread;
    let at = min(i, fours - 1u);
    let g = gate[row * (params.gate_stride / 4u) + at];
    let u = up[(row * params.up_stride + params.up_first) / 4u + at];
    let four = vec4(gelu(g.x), gelu(g.y), gelu(g.z), gelu(g.w)) * u;
    put_four(row * fours + i, four, i < fours, thread);
}
