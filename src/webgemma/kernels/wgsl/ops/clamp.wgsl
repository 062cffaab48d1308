// h[t] = x[t] clamped to bounds. A thread takes four values.
// uses: batch=tokens store clamped

struct Params {
    width: u32,
    low: f32,
    high: f32,
}

override THREADS: u32 = 64u;

var<storage, read> x: array<vec4<f32>>;
var<storage, read_write> h: array<Stored>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    if (t >= batch.count) {
        return;
    }
    let vec4s = params.width / 4u;
    let i = group.x * THREADS + thread;
    let values = x[t * vec4s + min(i, vec4s - 1u)];
    store_vec4(t * vec4s + i, clamped4(values, params.low, params.high), i < vec4s, thread);
}
