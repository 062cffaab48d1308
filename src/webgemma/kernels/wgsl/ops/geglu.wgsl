// h[r, i] = gelu(gate[r, i]) * up[r, i]; both may be slices of longer rows. A token has as many rows r as the grid
// has layers. A thread takes four i.
// uses: batch=tokens gelu store

struct Params {
    width: u32,
    gate_stride: u32,
    up_stride: u32,
    up_first: u32,
}

override THREADS: u32 = 64u;

var<storage, read> gate: array<vec4<f32>>;
var<storage, read> up: array<vec4<f32>>;
var<storage, read_write> h: array<Stored>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    if (group.y >= batch.count) {
        return;
    }
    let row = group.y * groups.z + group.z;
    let vec4s = params.width / 4u;
    let i = group.x * THREADS + thread;
    let at = min(i, vec4s - 1u);
    let g = gate[row * (params.gate_stride / 4u) + at];
    let u = up[(row * params.up_stride + params.up_first) / 4u + at];
    let values = vec4(gelu(g.x), gelu(g.y), gelu(g.z), gelu(g.w)) * u;
    store_vec4(row * vec4s + i, values, i < vec4s, thread);
}
