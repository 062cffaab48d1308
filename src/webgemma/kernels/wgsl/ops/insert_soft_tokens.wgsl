// x[t] = soft[t] for the soft tokens of a batch. A thread takes four values.
// uses: batch=soft_tokens

struct Params {
    width: u32,
}

override THREADS: u32 = 64u;

var<storage, read> soft: array<vec4<f32>>;
var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let i = group.x * THREADS + thread;
    if (t < batch.count && i < params.width / 4u) {
        let at = t * params.width / 4u + i;
        if (batch.ends[t] != 0u) {
            x[at] = soft[at];
        }
    }
}
