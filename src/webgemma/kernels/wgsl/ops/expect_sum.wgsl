// expected[first + t] = the sum over splits of sums[split, t], divided by total[t]: see expect. A thread
// takes four values.

struct Params {
    fours: u32, // of a row
    splits: u32,
    first: u32, // position of the first row
    tokens: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sums: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> findings: array<Finding>;
@group(0) @binding(3) var<storage, read_write> expected: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let column = group.x * THREADS + thread;
    let t = group.y;
    if (column >= params.fours) {
        return;
    }
    var sum = vec4(0.0);
    for (var split = 0u; split < params.splits; split++) {
        sum += sums[(split * params.tokens + t) * params.fours + column];
    }
    let position = params.first + t;
    expected[position * params.fours + column] = sum / findings[position].total;
}
