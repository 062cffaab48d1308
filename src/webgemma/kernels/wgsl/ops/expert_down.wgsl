// y[t, n] = sum over slots of shares[t, slot] * W[e, n] hidden[t, slot], e = ids[t, slot]: LANES threads
// for each n share the units of all slots. The first part of W sets y, the others add what they hold.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    first_row: u32, // of this part, among the rows of all experts
    rows: u32, // in this part
    units: u32,
    width: u32, // rows of an expert
    used: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> state: State;
@group(0) @binding(3) var<storage, read> ids: array<u32>;
@group(0) @binding(4) var<storage, read> shares: array<f32>;
@group(0) @binding(5) var<storage, read> hidden: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> y: array<f32>;

const ROWS: u32 = THREADS / LANES;
const FOURS: u32 = UNIT / 4u;

var<workgroup> lane_sums: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.z;
    if (t >= state.count) {
        return;
    }
    let n = group.x * ROWS + thread / LANES;
    var sum = 0.0;
    if (n < params.width) {
        for (var i = thread % LANES; i < params.used * params.units; i += LANES) {
            let place = t * params.used + i / params.units;
            let row = ids[place] * params.width + n - params.first_row; // wraps below the first
            if (row < params.rows) {
                let unit = i % params.units;
                let weights = decode(row, unit);
                let at = (place * params.units + unit) * FOURS;
                var part = 0.0;
                for (var k = 0u; k < FOURS; k++) {
                    part += dot(weights[k], hidden[at + k]);
                }
                sum += shares[place] * part;
            }
        }
    }
    lane_sums[thread] = sum;
    workgroupBarrier();
    if (thread % LANES != 0u || n >= params.width) {
        return;
    }
    for (var lane = 1u; lane < LANES; lane++) {
        sum += lane_sums[thread + lane];
    }
    if (params.first_row > 0u) {
        sum += y[t * params.width + n];
    }
    y[t * params.width + n] = sum;
}
