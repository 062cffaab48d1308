// h[t, n] = gelu(gate_n x[t]) * (up_n x[t]): W holds all gate rows, then all up rows. LANES threads share a pair of
// rows, TOKENS tokens t at a time. The slot `operand` says where x is, or what it is made of. A workgroup computes every
// so many pairs, as many as there are workgroups.
// uses: live lane_sum row_products operand gelu store_row format

struct Params {
    ffn: u32, // pairs of rows
}

override THREADS: u32;
override LANES: u32;
override EACH: u32 = 2u;
override TOKENS: u32 = 1u;

var<storage, read_write> h: array<Stored>;

const ROWS: u32 = THREADS / LANES; // pairs of a workgroup at a time

fn row_of(first: u32, each: u32) -> u32 {
    return first + each * params.ffn;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let t = group.z * TOKENS;
    let index = group.y * groups.x + group.x;
    let count = groups.x * groups.y;
    prepare(index, thread);
    for (var begin = index * ROWS; begin < params.ffn; begin += count * ROWS) {
        let row = begin + thread / LANES;
        var sums = array<f32, EACH * TOKENS>();
        if (row < params.ffn) {
            add_row(t, row, thread % LANES, &sums);
        }
        for (var i = 0u; i < TOKENS; i++) {
            let g = lane_sum(sums[i], thread);
            let u = lane_sum(sums[TOKENS + i], thread);
            let live = row < params.ffn && is_token(t + i);
            store_row((t + i) * params.ffn + row, gelu(g) * u, live, thread);
        }
    }
}
