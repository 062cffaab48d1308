// low[p, r] = scales[r] Σ_k A[e, r, k] x[p / fan, k] for each place p, one of the slots of a token,
// and its expert e: adapter_down.wgsl for experts. A workgroup takes EACH ranks r of a place.

struct Params {
    fours: u32, // of a row of x and of A
    ranks: u32,
    used: u32, // slots of a token
    fan: u32, // places that share a row of x
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> A: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> state: State;
@group(0) @binding(4) var<storage, read> scales: array<f32>;
@group(0) @binding(5) var<storage, read> ids: array<u32>;
@group(0) @binding(6) var<storage, read_write> low: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let p = group.y;
    if (p >= state.count * params.used) {
        return;
    }
    let first = group.x * EACH;
    var sums: array<f32, EACH>;
    for (var i = thread; i < params.fours; i += LANES) {
        let values = four_of(p / params.fan, i);
        for (var each = 0u; each < EACH; each++) {
            let row = ids[p] * params.ranks + first + each;
            sums[each] += dot(A[row * params.fours + i], values);
        }
    }
    for (var each = 0u; each < EACH; each++) {
        let sum = lanes_sum(sums[each], thread);
        if (thread == 0u) {
            low[p * params.ranks + first + each] = scales[first + each] * sum;
        }
    }
}
