// y[t, first + n] += Σ_j B[n, j] low[t, j]: the up projection of LoRA adapters, for a batch. A thread takes a row
// n and TOKENS tokens t; for the segments see epilogue/lora.
// uses: batch=tokens

struct Params {
    rows: u32,
    stride: u32, // values of y for each token
    first: u32,
    rank_vec4s: u32,
    second: u32, // rows where the second and third segment begin
    third: u32,
    segments: u32,
}

override THREADS: u32;
override TOKENS: u32;

var<storage, read> B: array<vec4<f32>>;
var<storage, read> low: array<vec4<f32>>;
var<storage, read_write> y: array<f32>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n = (group.z * groups.x + group.x) * THREADS + thread;
    let first_token = group.y * TOKENS;
    if (n >= params.rows || first_token >= batch.count) {
        return;
    }
    let segment = u32(n >= params.second) + u32(n >= params.third);
    var sums: array<f32, TOKENS>;
    for (var j = 0u; j < params.rank_vec4s; j++) {
        var parts: array<vec4<f32>, TOKENS>;
        var applied = false; // the adapter of these ranks
        for (var t = 0u; t < TOKENS; t++) {
            let token = min(first_token + t, batch.count - 1u);
            parts[t] = low[(token * params.segments + segment) * params.rank_vec4s + j];
            applied = applied || any(parts[t] != vec4<f32>());
        }
        if (applied) {
            let weights = B[n * params.rank_vec4s + j];
            for (var t = 0u; t < TOKENS; t++) {
                sums[t] += dot(weights, parts[t]);
            }
        }
    }
    for (var t = 0u; t < TOKENS; t++) {
        if (first_token + t < batch.count) {
            y[(first_token + t) * params.stride + params.first + n] += sums[t];
        }
    }
}
