// h[t, slot, n] = gelu(g) * u with g = W[e, gate + n] x[t], u = W[e, up + n] x[t], e the expert that token t is routed
// to in this slot. LANES threads for each n, a layer of the grid for each (slot, t). Every workgroup finds e by
// itself; one more than the rows need writes it to ids and shares. A part of W that holds only g's row leaves g
// in h, as a float; the part with u's row comes later and finds it there.
// uses: batch=tokens operand=buffer top_experts lane_sum row_products=two_units gelu store_row format

struct Params {
    first_row: u32, // of this part, among the rows of all experts
    rows: u32, // in this part
    expert_rows: u32,
    gate: u32, // the rows of an expert where gate and up begin; of two tensors
    up: u32, // each has only one of them (EACH 1), and the other is beyond all rows
    ffn: u32,
}

override THREADS: u32;
override LANES: u32;
override EACH: u32;

var<storage, read_write> h: array<Stored>;
var<storage, read_write> ids: array<u32>;
var<storage, read_write> shares: array<f32>;

const ROWS: u32 = THREADS / LANES;

fn row_of(first: u32, each: u32) -> u32 {
    let begin = select(params.gate, params.up, each + 1u == EACH && params.up < params.expert_rows);
    return min(first + begin, params.rows - 1u);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.z;
    if (t >= batch.count) {
        return;
    }
    rank(t, thread);
    let slot = t * params.used + group.y;
    let expert = chosen[group.y];
    if (group.x * ROWS >= params.ffn && thread == 0u) {
        ids[slot] = expert;
        shares[slot] = share_of(t, group.y);
    }
    let n = group.x * ROWS + thread / LANES;
    let row = expert * params.expert_rows + n - params.first_row; // wraps below the first
    let gate_here = n < params.ffn && row + params.gate < params.rows;
    let up_here = n < params.ffn && row + params.up < params.rows;
    var sums: array<f32, EACH>;
    if (gate_here || up_here) {
        add_row(t, row, thread % LANES, &sums);
    }
    var g = lane_sum(sums[0], thread);
    let u = lane_sum(sums[EACH - 1u], thread);
    let to = slot * params.ffn + n;
    if (up_here && !gate_here) {
        g = bitcast<f32>(h[to]);
    }
    store_row(to, select(g, gelu(g) * u, up_here), gate_here || up_here, thread);
}
