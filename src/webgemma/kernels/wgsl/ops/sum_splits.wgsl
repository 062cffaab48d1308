// y[i] = sum over splits s of parts[s, i], added to what y holds if add is 1. A thread takes four i.

struct Params {
    vec4s: u32,
    splits: u32,
    add: u32,
}

override THREADS: u32 = 64u;

var<storage, read> parts: array<vec4<f32>>;
var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (group.y * groups.x + group.x) * THREADS + thread;
    if (i >= params.vec4s) {
        return;
    }
    var sum = vec4(0.0);
    if (params.add == 1u) {
        sum = y[i];
    }
    for (var split = 0u; split < params.splits; split++) {
        sum += parts[split * params.vec4s + i];
    }
    y[i] = sum;
}
