// ple[t, l] = (rms(context[t, l] * context_scale) * w + token[t, l]) / sqrt(2), or without token and root where tokens
// have none. One workgroup for each (layer, token); token rows come already times sqrt(width).
// uses: workgroup_sum token_ple

struct Params {
    width: u32, // of a per-layer embedding
    layers: u32,
    eps: f32,
    context_scale: f32,
}

override THREADS: u32;

var<storage, read> context: array<f32>;
var<storage, read> w: array<f32>;
var<storage, read_write> ple: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = (group.y * params.layers + group.x) * params.width;
    var squares = 0.0;
    for (var i = thread; i < params.width; i += THREADS) {
        let c = context[at + i] * params.context_scale;
        squares += c * c;
    }
    let mean = workgroup_sum(squares, thread) / f32(params.width);
    let scale = inverseSqrt(mean + params.eps) * params.context_scale;
    for (var i = thread; i < params.width; i += THREADS) {
        ple[at + i] = with_token(context[at + i] * scale * w[i], at + i);
    }
}
