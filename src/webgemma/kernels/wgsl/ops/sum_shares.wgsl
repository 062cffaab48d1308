// y[i] = sum over shares s of parts[s, i], added to what y holds if add is 1. A thread takes four i.

struct Params {
    fours: u32,
    shares: u32,
    add: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> parts: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (group.y * groups.x + group.x) * THREADS + thread;
    if (i >= params.fours) {
        return;
    }
    var sum = vec4(0.0);
    if (params.add == 1u) {
        sum = y[i];
    }
    for (var share = 0u; share < params.shares; share++) {
        sum += parts[share * params.fours + i];
    }
    y[i] = sum;
}
