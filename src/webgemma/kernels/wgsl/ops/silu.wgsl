// x[t] = silu(x[t]) in place, held between two bounds before, and between two others after. A thread
// takes four values.

struct Params {
    width: u32,
    low: f32,
    high: f32,
    then_low: f32,
    then_high: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let fours = params.width / 4u;
    let i = group.x * THREADS + thread;
    if (group.y < state.count && i < fours) {
        let at = group.y * fours + i;
        let four = silu(clamp(x[at], vec4(params.low), vec4(params.high)));
        x[at] = clamp(four, vec4(params.then_low), vec4(params.then_high));
    }
}
