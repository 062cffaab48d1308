// y[p, first + n] += Σ_j B[e, n, j] low[p, j] for each place p and its expert e: adapter_up.wgsl for
// experts. A thread takes a row n of a place.

struct Params {
    rows: u32,
    stride: u32, // values of y for each place
    first: u32,
    rank_fours: u32,
    used: u32, // slots of a token
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> B: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> ids: array<u32>;
@group(0) @binding(4) var<storage, read> low: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let n = group.x * THREADS + thread;
    let p = group.y;
    if (n >= params.rows || p >= state.count * params.used) {
        return;
    }
    let row = (ids[p] * params.rows + n) * params.rank_fours;
    var sum = 0.0;
    for (var j = 0u; j < params.rank_fours; j++) {
        sum += dot(B[row + j], low[p * params.rank_fours + j]);
    }
    y[p * params.stride + params.first + n] += sum;
}
