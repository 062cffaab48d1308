// x[t] = silu(x[t]) in place, clamped to bounds before, and to other bounds after. A thread takes four values.
// uses: batch=tokens silu clamped

struct Params {
    width: u32,
    low: f32,
    high: f32,
    then_low: f32,
    then_high: f32,
}

override THREADS: u32 = 64u;

var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let vec4s = params.width / 4u;
    let i = group.x * THREADS + thread;
    if (group.y < batch.count && i < vec4s) {
        let at = group.y * vec4s + i;
        let values = silu(clamped4(x[at], params.low, params.high));
        x[at] = clamped4(values, params.then_low, params.then_high);
    }
}
