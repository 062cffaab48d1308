// h[t, n] = gelu(gate_n x[t]) * (up_n x[t]): W holds all gate rows, then all up rows. LANES threads
// share PAIRS neighbouring pairs of rows, one token t at a time. x_float or x_integer says what x is, row_float or
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

const EACH: u32 = 2u * PAIRS; // rows that LANES threads share
const GROUP_PAIRS: u32 = THREADS / LANES * PAIRS; // of a workgroup

fn row_of(first: u32, each: u32) -> u32 {
    return min(first + each / 2u, params.ffn - 1u) + each % 2u * params.ffn;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let t = group.z;
    let first = (group.y * groups.x + group.x) * GROUP_PAIRS + thread / LANES * PAIRS;
    var sums: array<f32, EACH>;
    if (first < params.ffn) {
        add_row(t, first, thread % LANES, &sums);
    }
    var values: array<f32, PAIRS>;
    for (var i = 0u; i < PAIRS; i++) {
        let g = lanes_sum(sums[2u * i], thread);
        let u = lanes_sum(sums[2u * i + 1u], thread);
        values[i] = gelu(g) * u;
    }
    let left = params.ffn - min(first, params.ffn);
    put_rows(t * params.ffn + first, values, select(0u, left, t < state.count), thread);
}
