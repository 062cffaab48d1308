// y[t, first + n] += Σ_j B[n, j] low[t, j]: the wide side of adapters, for a batch. A thread takes a
// row n and TOKENS tokens t; for the segments see finish_adapted.wgsl.

struct Params {
    rows: u32,
    stride: u32, // values of y for each token
    first: u32,
    rank_fours: u32,
    matrix_row: u32, // 0: all rows of the matrix are here
    second: u32,
    third: u32,
    segments: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> B: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> low: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n = (group.z * groups.x + group.x) * THREADS + thread;
    let first_token = group.y * TOKENS;
    if (n >= params.rows || first_token >= state.count) {
        return;
    }
    let segment = u32(n >= params.second) + u32(n >= params.third);
    var sums: array<f32, TOKENS>;
    for (var j = 0u; j < params.rank_fours; j++) {
        let weights = B[n * params.rank_fours + j];
        for (var t = 0u; t < TOKENS; t++) {
            let token = min(first_token + t, state.count - 1u);
            sums[t] += dot(weights, low[(token * params.segments + segment) * params.rank_fours + j]);
        }
    }
    for (var t = 0u; t < TOKENS; t++) {
        if (first_token + t < state.count) {
            y[(first_token + t) * params.stride + params.first + n] += sums[t];
        }
    }
}
