// y[t, to + i] = x[t, from + i] for `width` columns i: a thread takes one value.

struct Params {
    width: u32,
    batch: u32,
    x_stride: u32,
    x_first: u32,
    y_stride: u32,
    y_first: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (group.y * groups.x + group.x) * THREADS + thread;
    if (i < params.batch * params.width) {
        let t = i / params.width;
        let column = i % params.width;
        y[t * params.y_stride + params.y_first + column] = x[t * params.x_stride + params.x_first + column];
    }
}
