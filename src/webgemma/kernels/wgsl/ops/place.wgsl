// x[t] = soft[t] for the soft tokens of a batch. A thread takes four values.

struct Params {
    width: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> soft: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let i = group.x * THREADS + thread;
    if (t < state.count && i < params.width / 4u) {
        let at = t * params.width / 4u + i;
        if (state.ends[t] != 0u) {
            x[at] = soft[at];
        }
    }
}
