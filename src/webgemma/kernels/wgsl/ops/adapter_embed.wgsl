// x[t, i] += scale Σ_j B[i, j] scales[j] A[ids[t], j]: what adapters add to an embedding. A workgroup
// for each token and THREADS of its values.

struct Params {
    width: u32,
    rank_fours: u32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> A: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> B: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> scales: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> state: State;
@group(0) @binding(5) var<storage, read> ids: array<u32>;
@group(0) @binding(6) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = group.x * THREADS + thread;
    let t = group.y;
    if (t >= state.count || i >= params.width) {
        return;
    }
    let token = ids[t] * params.rank_fours;
    var sum = 0.0;
    for (var j = 0u; j < params.rank_fours; j++) {
        sum += dot(B[i * params.rank_fours + j], scales[j] * A[token + j]);
    }
    x[t * params.width + i] += params.scale * sum;
}
