// For each token t and row n: the sum over k of W[n, k] x[t, k], handed to finish(t, n, sum), without a barrier: for
// software GPUs. A subgroup, THREADS threads, computes TOKENS tokens of EACH rows for each thread. Its threads
// read THREADS neighbouring vec4s of x and pass them around.
// uses: batch=tokens epilogue format

struct Params {
    rows: u32, // in this part of W
    units: u32,
    tokens: u32, // of x
}

override THREADS: u32;
override EACH: u32;
override TOKENS: u32;

var<storage, read> x: array<vec4<f32>>;

const UNIT_VEC4S: u32 = UNIT / 4u;
const STEP: u32 = max(1u, THREADS / UNIT_VEC4S); // units at a time
const STEP_VEC4S: u32 = STEP * UNIT_VEC4S;

alias RowWeights = array<array<vec4<f32>, STEP_VEC4S>, EACH>;

fn load_weights(weights: ptr<function, RowWeights>, row: u32, unit: u32) {
    for (var each = 0u; each < EACH; each++) {
        let n = min(row + each * THREADS, params.rows - 1u);
        for (var u = 0u; u < STEP; u++) {
            let decoded = decode(n, min(unit + u, params.units - 1u));
            for (var i = 0u; i < UNIT_VEC4S; i++) {
                (*weights)[each][u * UNIT_VEC4S + i] = decoded[i];
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
    let count = min(batch.count, params.tokens);
    if (first >= count) {
        return;
    }
    let width = params.units * UNIT_VEC4S;
    var sums: array<array<vec4<f32>, EACH>, TOKENS>;
    var weights: RowWeights;
    for (var unit = 0u; unit < params.units; unit += STEP) {
        load_weights(&weights, row, unit);
        for (var t = 0u; t < TOKENS; t++) {
            for (var i = 0u; i < STEP_VEC4S; i += THREADS) {
                let k = unit * UNIT_VEC4S + i + thread;
                let at = min(first + t, count - 1u) * width + min(k, width - 1u);
                let own = select(vec4(0.0), x[at], k < width);
                for (var j = 0u; j < THREADS; j++) {
                    let value = subgroupShuffle(own, j);
                    for (var each = 0u; each < EACH; each++) {
                        sums[t][each] = fma(weights[each][i + j], value, sums[t][each]);
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
