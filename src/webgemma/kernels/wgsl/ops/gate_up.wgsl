// h[t, n] = gelu(gate_n x[t]) * (up_n x[t]): W holds all gate rows, then all up rows. LANES threads
// share a pair of rows, one token t at a time. x_float or x_integer says what x is, row_float or
// row_integer what becomes of h.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    ffn: u32, // pairs of rows
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> state: State;
@group(0) @binding(4) var<storage, read_write> h: array<Stored>;

const EACH: u32 = 2u;
const ROWS: u32 = THREADS / LANES; // pairs of a workgroup

fn row_of(first: u32, each: u32) -> u32 {
    return first + each * params.ffn;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let t = group.z;
    let row = (group.y * groups.x + group.x) * ROWS + thread / LANES;
    var sums: array<f32, EACH>;
    if (row < params.ffn) {
        add_row(t, row, thread % LANES, &sums);
    }
    let g = lanes_sum(sums[0], thread);
    let u = lanes_sum(sums[1], thread);
    let live = row < params.ffn && t < state.count;
    put_row(t * params.ffn + row, gelu(g) * u, live, thread);
}
