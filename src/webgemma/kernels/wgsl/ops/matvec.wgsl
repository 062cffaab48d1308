// For each row n: sum over k of W[n, k] x[t, k], handed to finish(t, n, sum). LANES threads share
// EACH rows, so that what is read of x serves all of them; one token t at a time. x_float or
// x_integer says what x is.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    first_row: u32, // of y: where this part's rows begin
    rows: u32,
    units: u32,
    stride: u32, // values of y for each token
    up_stride: u32,
    up_first: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> state: State;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

const ROWS: u32 = THREADS / LANES * EACH; // of a workgroup

fn row_of(first: u32, each: u32) -> u32 {
    return min(first + each, params.rows - 1u);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let t = group.z;
    let first = (group.y * groups.x + group.x) * ROWS + thread / LANES * EACH;
    var sums: array<f32, EACH>;
    if (first < params.rows) {
        add_row(t, first, thread % LANES, &sums);
    }
    for (var each = 0u; each < EACH; each++) {
        let sum = lanes_sum(sums[each], thread);
        if (thread % LANES == 0u && first + each < params.rows && t < state.count) {
            finish(t, first + each, sum);
        }
    }
}
