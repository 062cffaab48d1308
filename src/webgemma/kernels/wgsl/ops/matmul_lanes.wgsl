// For each token t and row n: sum over k of W[n, k] x[t, k], handed to finish(t, n, sum), without a
// barrier: for adapters that are CPUs. A subgroup, THREADS threads, computes TOKENS tokens of EACH
// rows for each thread. Its threads read THREADS neighbouring fours of x and pass them around.

@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;

const UNIT_FOURS: u32 = UNIT / 4u;
const STEP: u32 = max(1u, THREADS / UNIT_FOURS); // units at a time
const FOURS: u32 = STEP * UNIT_FOURS;

alias Weights = array<array<vec4<f32>, FOURS>, EACH>;

fn load_weights(weights: ptr<function, Weights>, row: u32, unit: u32) {
    for (var each = 0u; each < EACH; each++) {
        let n = min(row + each * THREADS, params.rows - 1u);
        for (var u = 0u; u < STEP; u++) {
            let decoded = decode(n, min(unit + u, params.units - 1u));
            for (var i = 0u; i < UNIT_FOURS; i++) {
                (*weights)[each][u * UNIT_FOURS + i] = decoded[i];
            }
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = (group.z * groups.x + group.x) * THREADS * EACH + thread;
    let first = group.y * TOKENS;
    let count = min(state.count, params.batch);
    if (first >= count) {
        return;
    }
    let width = params.units * UNIT_FOURS;
    var sums: array<array<vec4<f32>, EACH>, TOKENS>;
    var weights: Weights;
    for (var unit = 0u; unit < params.units; unit += STEP) {
        load_weights(&weights, row, unit);
        for (var t = 0u; t < TOKENS; t++) {
            for (var four = 0u; four < FOURS; four += THREADS) {
                let k = unit * UNIT_FOURS + four + thread;
                let at = min(first + t, count - 1u) * width + min(k, width - 1u);
                let own = select(vec4(0.0), x[at], k < width);
                for (var i = 0u; i < THREADS; i++) {
                    let value = subgroupShuffle(own, i);
                    for (var each = 0u; each < EACH; each++) {
                        sums[t][each] = fma(weights[each][four + i], value, sums[t][each]);
                    }
                }
            }
        }
    }
    for (var t = 0u; t < TOKENS; t++) {
        for (var each = 0u; each < EACH; each++) {
            let n = row + each * THREADS;
            if (first + t < count && n < params.rows) {
                let sum = sums[t][each];
                finish(first + t, n, sum.x + sum.y + sum.z + sum.w);
            }
        }
    }
}
