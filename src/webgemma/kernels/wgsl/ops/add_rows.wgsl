// x[t] = x[t] + a[t] + b[t]. A thread takes four values.
// uses: batch=tokens

struct Params {
    width: u32,
}

override THREADS: u32 = 64u;

var<storage, read> a: array<vec4<f32>>;
var<storage, read> b: array<vec4<f32>>;
var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = group.x * THREADS + thread;
    if (group.y < batch.count && i < params.width / 4u) {
        let at = group.y * params.width / 4u + i;
        x[at] += a[at] + b[at];
    }
}
