// h[t] = rms(x[t]) * w. One workgroup per token.
// uses: workgroup_sum store

struct Params {
    width: u32,
    eps: f32,
}

override THREADS: u32;

var<storage, read> x: array<vec4<f32>>;
var<storage, read> w: array<vec4<f32>>;
var<storage, read_write> h: array<Stored>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let vec4s = params.width / 4u;
    let at = group.x * vec4s;
    var squares = 0.0;
    for (var i = thread; i < vec4s; i += THREADS) {
        squares += dot(x[at + i], x[at + i]);
    }
    let mean = workgroup_sum(squares, thread) / f32(params.width);
    let scale = inverseSqrt(mean + params.eps);
    for (var first = 0u; first < vec4s; first += THREADS) {
        let i = min(first + thread, vec4s - 1u);
        let live = first + thread < vec4s;
        store_vec4(at + first + thread, x[at + i] * scale * w[i], live, thread);
    }
}
