// out[t] = (x[t] + rms(y[t]) * w) * scale. One workgroup per token.
// uses: workgroup_sum

struct Params {
    width: u32,
    eps: f32,
}

override THREADS: u32;

var<storage, read> x: array<vec4<f32>>;
var<storage, read> y: array<vec4<f32>>;
var<storage, read> w: array<vec4<f32>>;
var<storage, read> scale: array<f32>;
var<storage, read_write> out: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let vec4s = params.width / 4u;
    let at = group.x * vec4s;
    var squares = 0.0;
    for (var i = thread; i < vec4s; i += THREADS) {
        squares += dot(y[at + i], y[at + i]);
    }
    let r = inverseSqrt(workgroup_sum(squares, thread) / f32(params.width) + params.eps);
    for (var i = thread; i < vec4s; i += THREADS) {
        out[at + i] = (x[at + i] + y[at + i] * r * w[i]) * scale[0];
    }
}
