// y[t, n] = sum over slots of shares[t, slot] * parts[t, slot, n], in the order of the slots. One thread per value.
// uses: batch=tokens

struct Params {
    width: u32,
    used: u32,
}

override THREADS: u32 = 64u;

var<storage, read> shares: array<f32>;
var<storage, read> parts: array<f32>;
var<storage, read_write> y: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let n = group.x * THREADS + thread;
    if (n >= params.width || t >= batch.count) {
        return;
    }
    var sum = 0.0;
    for (var i = 0u; i < params.used; i++) {
        let slot = t * params.used + i;
        sum += shares[slot] * parts[slot * params.width + n];
    }
    y[t * params.width + n] = sum;
}
