// The backward pass of h = gelu(gate) * up: d[r, i] = dh up gelu'(gate), d[r, width + i] = dh gelu(gate). gate and up
// may be slices of longer rows. A thread takes one i of a row r.
// uses: gelu_slope

struct Params {
    width: u32,
    gate_stride: u32,
    up_stride: u32,
    up_first: u32,
}

override THREADS: u32 = 64u;

var<storage, read> gate: array<f32>;
var<storage, read> up: array<f32>;
var<storage, read> dh: array<f32>;
var<storage, read_write> d: array<f32>;

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
    let value_slope = gelu_and_slope(gate[row * params.gate_stride + i]);
    let gradient = dh[row * params.width + i];
    let to = 2u * row * params.width + i;
    d[to] = gradient * up[row * params.up_stride + params.up_first + i] * value_slope.y;
    d[to + params.width] = gradient * value_slope.x;
}
