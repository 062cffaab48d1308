// y[ids[t]] += x[t], rows of `width` values: the backward pass of gather_rows. A thread takes one value of a row, and
// of all rows with the same id the first adds up the others'.

struct Params {
    width: u32,
    tokens: u32,
}

override THREADS: u32 = 64u;

var<storage, read> ids: array<u32>;
var<storage, read> x: array<f32>;
var<storage, read_write> y: array<f32>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (group.y * groups.x + group.x) * THREADS + thread;
    if (i >= params.tokens * params.width) {
        return;
    }
    let t = i / params.width;
    let id = ids[t];
    for (var other = 0u; other < t; other++) {
        if (ids[other] == id) {
            return;
        }
    }
    var sum = 0.0;
    for (var other = t; other < params.tokens; other++) {
        if (ids[other] == id) {
            sum += x[other * params.width + i % params.width];
        }
    }
    y[id * params.width + i % params.width] += sum;
}
