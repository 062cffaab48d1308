// to[first_to + n] = rows[first + n] for `count` rows. A thread takes four values.

struct Params {
    width: u32,
    first: u32,
    first_to: u32,
    count: u32,
}

override THREADS: u32;

var<storage, read> rows: array<vec4<f32>>;
var<storage, read_write> to: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let vec4s = params.width / 4u;
    let i = group.x * THREADS + thread;
    if (group.y < params.count && i < vec4s) {
        to[(params.first_to + group.y) * vec4s + i] = rows[(params.first + group.y) * vec4s + i];
    }
}
