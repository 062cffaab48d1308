// logits = cap * tanh(logits / cap), in place; what is not finite stays, for the host to see. A thread takes one.
// uses: finite softcap

struct Params {
    count: u32,
}

override THREADS: u32 = 64u;

var<storage, read_write> logits: array<f32>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (group.y * groups.x + group.x) * THREADS + thread;
    if (i < params.count && is_finite(logits[i])) {
        logits[i] = softcapped(logits[i]);
    }
}
