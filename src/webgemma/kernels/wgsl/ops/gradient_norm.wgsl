// norm[0] = sqrt(sum of sums[i]). One workgroup.
// uses: workgroup_sum

struct Params {
    count: u32,
}

override THREADS: u32;

var<storage, read> sums: array<f32>;
var<storage, read_write> norm: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    var sum = 0.0;
    for (var i = thread; i < params.count; i += THREADS) {
        sum += sums[i];
    }
    let total = workgroup_sum(sum, thread);
    if (thread == 0u) {
        norm[0] = sqrt(total);
    }
}
