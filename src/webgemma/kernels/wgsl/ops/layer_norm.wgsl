// h[t] = (y - mean) / sqrt(variance + eps) * w + b, where y = x[t] + shift if SHIFTED, else y = x[t]. One workgroup
// per row.
// uses: batch=tokens workgroup_sum

struct Params {
    width: u32,
    eps: f32,
}

override THREADS: u32;
override SHIFTED: bool;

var<storage, read> x: array<vec4<f32>>;
var<storage, read> shift: array<vec4<f32>>;
var<storage, read> w: array<vec4<f32>>;
var<storage, read> b: array<vec4<f32>>;
var<storage, read_write> h: array<vec4<f32>>;

fn value(at: u32, i: u32) -> vec4<f32> {
    if (SHIFTED) {
        return x[at + i] + shift[i];
    }
    return x[at + i];
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let vec4s = params.width / 4u;
    let at = group.x * vec4s;
    var sum = 0.0;
    for (var i = thread; i < vec4s; i += THREADS) {
        sum += dot(value(at, i), vec4(1.0));
    }
    let mean = workgroup_sum(sum, thread) / f32(params.width);
    var squares = 0.0;
    for (var i = thread; i < vec4s; i += THREADS) {
        let centred = value(at, i) - mean;
        squares += dot(centred, centred);
    }
    let scale = inverseSqrt(workgroup_sum(squares, thread) / f32(params.width) + params.eps);
    for (var i = thread; i < vec4s && group.x < batch.count; i += THREADS) {
        h[at + i] = (value(at, i) - mean) * scale * w[i] + b[i];
    }
}
