// y[t, n] = sum over slots of shares[t, slot] * W[e, n] x[t, slot], e = ids[t, slot]: LANES threads share
// EACH rows n and the units of all slots. x_float or x_integer says what x is. The first part of W sets
// y, the others add what they hold.

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
@group(0) @binding(4) var<storage, read> ids: array<u32>;
@group(0) @binding(5) var<storage, read> shares: array<f32>;
@group(0) @binding(6) var<storage, read_write> y: array<f32>;

const ROWS: u32 = THREADS / LANES * EACH; // of a workgroup

fn row_of(first: u32, each: u32) -> u32 {
    return min(first + each, params.rows - 1u);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.z;
    if (t >= state.count) {
        return;
    }
    let n = group.x * ROWS + thread / LANES * EACH;
    var sums: array<f32, EACH>;
    if (n < params.width) {
        for (var i = thread % LANES; i < params.used * params.units; i += LANES) {
            let place = t * params.used + i / params.units;
            let first = ids[place] * params.width + n - params.first_row; // wraps below the first
            if (first < params.rows || first + EACH - 1u < params.rows) {
                var products = array<f32, EACH>(); // in a loop, naga zeroes no var by itself
                add_products(place, i % params.units, first, &products);
                for (var each = 0u; each < EACH; each++) {
                    if (first + each < params.rows) {
                        sums[each] += shares[place] * products[each];
                    }
                }
            }
        }
    }
    for (var each = 0u; each < EACH; each++) {
        var sum = lanes_sum(sums[each], thread);
        if (thread % LANES == 0u && n + each < params.width) {
            let to = t * params.width + n + each;
            if (params.first_row > 0u) {
                sum += y[to];
            }
            y[to] = sum;
        }
    }
}
