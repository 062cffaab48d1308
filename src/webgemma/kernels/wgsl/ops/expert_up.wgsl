// hidden[t, slot, n] = gelu(g) * u with g = W[e, gate + n] m[t], u = W[e, up + n] m[t], e = ids[t, slot]:
// LANES threads for each n, a layer of the grid for each (slot, t). A part of W that holds only g's row
// leaves g in hidden; the part with u's row comes later and finds it there.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    first_row: u32, // of this part, among the rows of all experts
    rows: u32, // in this part
    units: u32,
    expert_rows: u32,
    gate: u32, // the rows of an expert where gate and up begin; of two tensors
    up: u32, // each has only one of them, and the other is beyond all rows
    ffn: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> state: State;
@group(0) @binding(3) var<storage, read> ids: array<u32>;
@group(0) @binding(4) var<storage, read> m: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> hidden: array<f32>;

const ROWS: u32 = THREADS / LANES;
const FOURS: u32 = UNIT / 4u;

var<workgroup> lane_sums: array<vec2<f32>, THREADS>;

fn dot_unit(row: u32, unit: u32, t: u32) -> f32 {
    let weights = decode(row, unit);
    let at = (t * params.units + unit) * FOURS;
    var sum = 0.0;
    for (var i = 0u; i < FOURS; i++) {
        sum += dot(weights[i], m[at + i]);
    }
    return sum;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let t = group.z;
    if (t >= state.count) {
        return;
    }
    let place = t * groups.y + group.y;
    let n = group.x * ROWS + thread / LANES;
    let row = ids[place] * params.expert_rows + n - params.first_row; // wraps below the first
    let gate_here = n < params.ffn && row + params.gate < params.rows;
    let up_here = n < params.ffn && row + params.up < params.rows;
    var sums = vec2(0.0);
    if (gate_here || up_here) {
        for (var unit = thread % LANES; unit < params.units; unit += LANES) {
            if (gate_here) {
                sums.x += dot_unit(row + params.gate, unit, t);
            }
            if (up_here) {
                sums.y += dot_unit(row + params.up, unit, t);
            }
        }
    }
    lane_sums[thread] = sums;
    workgroupBarrier();
    if (thread % LANES != 0u || !(gate_here || up_here)) {
        return;
    }
    for (var lane = 1u; lane < LANES; lane++) {
        sums += lane_sums[thread + lane];
    }
    let to = place * params.ffn + n;
    var g = sums.x;
    if (!gate_here) {
        g = hidden[to];
    }
    if (up_here) {
        hidden[to] = gelu(g) * sums.y;
    } else {
        hidden[to] = g;
    }
}
