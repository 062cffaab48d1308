// y[t, n] = sum over slots of shares[t, slot] * W[e, n] x[t, slot], e = ids[t, slot]: LANES threads share EACH rows n
// and the units of all slots, two at a time as in row_products. Where W is not in one part (WHOLE false), the
// first part sets y, the others add what they hold.
// uses: batch=tokens operand=buffer lane_sum input format

struct Params {
    first_row: u32, // of this part, among the rows of all experts
    rows: u32, // in this part
    units: u32,
    expert_rows: u32,
    used: u32,
}

override THREADS: u32;
override LANES: u32;
override EACH: u32;
override WHOLE: bool;

var<storage, read> ids: array<u32>;
var<storage, read> shares: array<f32>;
var<storage, read_write> y: array<f32>;

const ROWS: u32 = THREADS / LANES * EACH; // of a workgroup

fn row_of(first: u32, each: u32) -> u32 {
    return min(first + each, params.rows - 1u);
}

// The unit i of all slots together; rows outside this part are left out.
fn add_unit(t: u32, i: u32, n: u32, sums: ptr<function, array<f32, EACH>>) {
    let slot = t * params.used + i / params.units;
    let first = ids[slot] * params.expert_rows + n - params.first_row; // wraps below the first
    if (WHOLE || first < params.rows || first + EACH - 1u < params.rows) {
        var products: array<f32, EACH>;
        add_products(slot, i % params.units, first, &products);
        for (var each = 0u; each < EACH; each++) {
            if (WHOLE || first + each < params.rows) {
                (*sums)[each] += shares[slot] * products[each];
            }
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.z;
    if (t >= batch.count) {
        return;
    }
    let n = group.x * ROWS + thread / LANES * EACH;
    var sums: array<f32, EACH>;
    if (n < params.expert_rows) {
        let units = params.used * params.units;
        var i = thread % LANES;
        for (; i + LANES < units; i += 2u * LANES) {
            add_unit(t, i, n, &sums);
            add_unit(t, i + LANES, n, &sums);
        }
        if (i < units) {
            add_unit(t, i, n, &sums);
        }
    }
    for (var each = 0u; each < EACH; each++) {
        var sum = lane_sum(sums[each], thread);
        if (thread % LANES == 0u && n + each < params.expert_rows) {
            let to = t * params.expert_rows + n + each;
            if (params.first_row > 0u) {
                sum += y[to];
            }
            y[to] = sum;
        }
    }
}
