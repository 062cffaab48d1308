// sums[first + g] = sum of x[i]^2 over the i of workgroup g, EACH for every thread.
// uses: workgroup_sum

struct Params {
    count: u32,
    first: u32,
}

override THREADS: u32;
override EACH: u32;

var<storage, read> x: array<f32>;
var<storage, read_write> sums: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = group.x * THREADS * EACH + thread;
    var squares = 0.0;
    for (var i = first; i < min(params.count, first + THREADS * EACH); i += THREADS) {
        squares += x[i] * x[i];
    }
    let total = workgroup_sum(squares, thread);
    if (thread == 0u) {
        sums[params.first + group.x] = total;
    }
}
