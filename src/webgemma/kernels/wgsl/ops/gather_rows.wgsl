// y[t] = x[ids[t]], rows of `width` values. A thread takes one value.

struct Params {
    width: u32,
    tokens: u32,
}

override THREADS: u32 = 64u;

var<storage, read> ids: array<u32>;
var<storage, read> x: array<f32>;
var<storage, read_write> y: array<f32>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (group.y * groups.x + group.x) * THREADS + thread;
    if (i < params.tokens * params.width) {
        y[i] = x[ids[i / params.width] * params.width + i % params.width];
    }
}
