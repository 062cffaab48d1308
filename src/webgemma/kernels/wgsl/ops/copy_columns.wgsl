// y[t, y_first + i] = x[t, x_first + i] for `width` columns i. A thread takes one value.

struct Params {
    width: u32,
    tokens: u32,
    x_stride: u32,
    x_first: u32,
    y_stride: u32,
    y_first: u32,
}

override THREADS: u32 = 64u;

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
        let t = i / params.width;
        let column = i % params.width;
        y[t * params.y_stride + params.y_first + column] = x[t * params.x_stride + params.x_first + column];
    }
}
