// ids[t, slot] and shares[t, slot]: which experts a token is routed to, and the weight of each. One workgroup per
// token.
// uses: batch=tokens top_experts

struct Params {
    used: u32,
}

override THREADS: u32 = 64u;

var<storage, read_write> ids: array<u32>;
var<storage, read_write> shares: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.x;
    if (t >= batch.count) {
        return;
    }
    rank(t, thread);
    if (thread < params.used) {
        ids[t * params.used + thread] = chosen[thread];
        shares[t * params.used + thread] = share_of(t, thread);
    }
}
