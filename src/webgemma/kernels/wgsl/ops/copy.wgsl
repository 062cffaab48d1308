// to = source, four words at a time: a workgroup copies EACH runs of THREADS.

struct Params {
    vec4s: u32,
}

override THREADS: u32;
override EACH: u32;

var<storage, read> source: array<vec4<u32>>;
var<storage, read_write> to: array<vec4<u32>>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let first = (group.y * groups.x + group.x) * THREADS * EACH + thread;
    for (var i = first; i < min(params.vec4s, first + THREADS * EACH); i += THREADS) {
        to[i] = source[i];
    }
}
