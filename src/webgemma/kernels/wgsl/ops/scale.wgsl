// x[i] = x[i] * scale[0] * factor. A thread takes four i.

struct Params {
    vec4s: u32,
    factor: f32,
}

override THREADS: u32 = 64u;

var<storage, read> scale: array<f32>;
var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (group.y * groups.x + group.x) * THREADS + thread;
    if (i < params.vec4s) {
        x[i] *= scale[0] * params.factor;
    }
}
