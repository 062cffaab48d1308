// length[0] = sqrt(sum of sums[i]): one workgroup.

struct Params {
    count: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sums: array<f32>;
@group(0) @binding(2) var<storage, read_write> length_of: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    var sum = 0.0;
    for (var i = thread; i < params.count; i += THREADS) {
        sum += sums[i];
    }
    let total = workgroup_sum(sum, thread);
    if (thread == 0u) {
        length_of[0] = sqrt(total);
    }
}
