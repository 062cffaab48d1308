// h[t] = x[t], held between two bounds. A thread takes four values.

struct Params {
    width: u32,
    low: f32,
    high: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> h: array<Stored>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    if (t >= state.count) {
        return;
    }
    let fours = params.width / 4u;
    let i = group.x * THREADS + thread;
    let four = x[t * fours + min(i, fours - 1u)];
    put_four(t * fours + i, clamp(four, vec4(params.low), vec4(params.high)), i < fours, thread);
}
