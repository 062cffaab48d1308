// sums[slot] = Σ g²: the square of a gradient's length. One workgroup.

struct Params {
    count: u32,
    slot: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> g: array<f32>;
@group(0) @binding(2) var<storage, read_write> sums: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    var mine = 0.0;
    for (var i = thread; i < params.count; i += THREADS) {
        mine += g[i] * g[i];
    }
    let sum = workgroup_sum(mine, thread);
    if (thread == 0u) {
        sums[params.slot] = sum;
    }
}
