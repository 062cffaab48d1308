// data[first_to + i] = data[first + i] for i below `vec4s`: a copy inside one buffer, which WebGPU's own cannot make. The two
// ranges do not overlap. A thread copies EACH vec4s.

struct Params {
    first: u32,
    first_to: u32,
    vec4s: u32,
}

override THREADS: u32;
override EACH: u32;

var<storage, read_write> data: array<vec4<u32>>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let begin = (group.y * groups.x + group.x) * THREADS * EACH + thread;
    for (var each = 0u; each < EACH; each++) {
        let i = begin + each * THREADS;
        if (i < params.vec4s) {
            data[params.first_to + i] = data[params.first + i];
        }
    }
}
