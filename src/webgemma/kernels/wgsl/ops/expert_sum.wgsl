// y[t, n] = sum over slots of shares[t, slot] * parts[t, slot, n], in the order of the slots: one thread
// for each value.

struct Params {
    width: u32,
    used: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> shares: array<f32>;
@group(0) @binding(3) var<storage, read> parts: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let n = group.x * THREADS + thread;
    if (n >= params.width || t >= state.count) {
        return;
    }
    var sum = 0.0;
    for (var slot = 0u; slot < params.used; slot++) {
        let place = t * params.used + slot;
        sum += shares[place] * parts[place * params.width + n];
    }
    y[t * params.width + n] = sum;
}
