// y[i] = sum over splits s of parts[s, i], added to what y holds if add is 1. y may be columns of longer rows. A
// thread takes four i.

struct Params {
    vec4s: u32, // of a split
    row_vec4s: u32, // of a row of parts
    stride: u32, // vec4s of a row of y
    first: u32, // where those of parts begin
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
    let to = i / params.row_vec4s * params.stride + params.first + i % params.row_vec4s;
    if (params.add == 1u) {
        sum = y[to];
    }
    for (var split = 0u; split < params.splits; split++) {
        sum += parts[split * params.vec4s + i];
    }
    y[to] = sum;
}
