// low[t, r] = scales[r] Σ_k A[r, k] x[t, k]: the down projection of LoRA adapters. A workgroup takes EACH ranks r
// of TOKENS tokens t; its LANES threads share k.
// uses: batch=tokens lane_sum input_vec4

struct Params {
    vec4s: u32, // of a row of x and of A
    ranks: u32,
}

override THREADS: u32;
override LANES: u32;
override EACH: u32;
override TOKENS: u32;

var<storage, read> A: array<vec4<f32>>;
var<storage, read> scales: array<f32>;
var<storage, read_write> low: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first_rank = group.x * EACH;
    let first_token = group.y * TOKENS;
    var sums: array<array<f32, TOKENS>, EACH>;
    for (var i = thread; i < params.vec4s; i += LANES) {
        var values: array<vec4<f32>, TOKENS>;
        for (var t = 0u; t < TOKENS; t++) {
            values[t] = vec4_of(min(first_token + t, batch.count - 1u), i);
        }
        for (var each = 0u; each < EACH; each++) {
            let weights = A[(first_rank + each) * params.vec4s + i];
            for (var t = 0u; t < TOKENS; t++) {
                sums[each][t] += dot(weights, values[t]);
            }
        }
    }
    for (var each = 0u; each < EACH; each++) {
        let rank = first_rank + each;
        for (var t = 0u; t < TOKENS; t++) {
            let sum = lane_sum(sums[each][t], thread);
            if (thread == 0u && first_token + t < batch.count) {
                low[(first_token + t) * params.ranks + rank] = scales[rank] * sum;
            }
        }
    }
}
