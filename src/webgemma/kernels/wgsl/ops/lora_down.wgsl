// low[t, r] = s Σ_k A[r, k] x[t, k], where s is the scale of rank r's adapter in the conversation of t: the down
// projection of LoRA adapters. A workgroup takes EACH ranks r, all of one adapter, of TOKENS tokens t; its LANES threads
// share k. An adapter that no token applies is not read.
// uses: place lora_scale lane_sum input_vec4

struct Params {
    vec4s: u32, // of a row of x and of A
    ranks: u32,
}

override THREADS: u32;
override LANES: u32;
override EACH: u32;
override TOKENS: u32;

var<storage, read> A: array<vec4<f32>>;
var<storage, read> columns: array<u32>; // of EACH ranks
var<storage, read_write> low: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first_rank = group.x * EACH;
    let first_token = group.y * TOKENS;
    var scales: array<f32, TOKENS>;
    var applied = false;
    for (var t = 0u; t < TOKENS; t++) {
        scales[t] = lora_scale(min(first_token + t, batch.count - 1u), columns[group.x]);
        applied = applied || scales[t] != 0.0;
    }
    var sums: array<array<f32, TOKENS>, EACH>;
    for (var i = select(params.vec4s, thread, applied); i < params.vec4s; i += LANES) {
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
                low[(first_token + t) * params.ranks + rank] = select(0.0, scales[t] * sum, scales[t] != 0.0);
            }
        }
    }
}
