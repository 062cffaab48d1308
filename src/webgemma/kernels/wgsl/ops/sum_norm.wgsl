// x[t] = rms(x[t] + y[t]), in place. One workgroup per token.
// uses: workgroup_sum

struct Params {
    width: u32,
    eps: f32,
}

override THREADS: u32;

var<storage, read> y: array<vec4<f32>>;
var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let vec4s = params.width / 4u;
    let at = group.x * vec4s;
    var squares = 0.0;
    for (var i = thread; i < vec4s; i += THREADS) {
        let sum = x[at + i] + y[at + i];
        x[at + i] = sum;
        squares += dot(sum, sum);
    }
    let mean = workgroup_sum(squares, thread) / f32(params.width);
    let scale = inverseSqrt(mean + params.eps);
    for (var i = thread; i < vec4s; i += THREADS) {
        x[at + i] *= scale;
    }
}
