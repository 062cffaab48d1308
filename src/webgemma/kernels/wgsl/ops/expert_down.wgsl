// y[t, n] = sum over slots of shares[t, slot] * W[e, n] x[t, slot], e = ids[t, slot]: LANES threads share
// EACH rows n and the units of all slots, two at a time as in row_products.wgsl. x_float or x_integer says
// what x is. Where W is not in one part (WHOLE 0), the first sets y, the others add what they hold.

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

// The unit i of all slots together; rows that this part has not got are left out.
fn add_unit(t: u32, i: u32, n: u32, sums: ptr<function, array<f32, EACH>>) {
    let place = t * params.used + i / params.units;
    let first = ids[place] * params.width + n - params.first_row; // wraps below the first
    if (WHOLE == 1u || first < params.rows || first + EACH - 1u < params.rows) {
        var products: array<f32, EACH>;
        add_products(place, i % params.units, first, &products);
        for (var each = 0u; each < EACH; each++) {
            if (WHOLE == 1u || first + each < params.rows) {
                (*sums)[each] += shares[place] * products[each];
            }
        }
    }
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
