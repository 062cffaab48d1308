// expected[first + t] = scale times the sum over splits of sums[split, t], divided by total[t]: see
// expected_embedding. A thread takes four values.
// uses: position_stats

struct Params {
    vec4s: u32, // of a row
    splits: u32,
    first: u32, // position of the first row
    tokens: u32,
    scale: f32,
}

override THREADS: u32 = 64u;

var<storage, read> sums: array<vec4<f32>>;
var<storage, read> stats: array<PositionStats>;
var<storage, read_write> expected: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let column = group.x * THREADS + thread;
    let t = group.y;
    if (column >= params.vec4s) {
        return;
    }
    var sum = vec4(0.0);
    for (var split = 0u; split < params.splits; split++) {
        sum += sums[(split * params.tokens + t) * params.vec4s + column];
    }
    let position = params.first + t;
    expected[position * params.vec4s + column] = sum * (params.scale / stats[position].total);
}
