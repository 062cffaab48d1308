// ids[t, slot] and shares[t, slot]: which experts a token asks and how much each counts. One workgroup
// for each token.

struct Params {
    experts: u32,
    used: u32,
    scale_step: u32, // 0: one scale for all
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> scores: array<f32>;
@group(0) @binding(3) var<storage, read> scale: array<f32>;
@group(0) @binding(4) var<storage, read_write> ids: array<u32>;
@group(0) @binding(5) var<storage, read_write> shares: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.x;
    if (t >= state.count) {
        return;
    }
    rank(t, thread);
    if (thread < params.used) {
        ids[t * params.used + thread] = chosen[thread];
        shares[t * params.used + thread] = share_of(t, thread);
    }
}
