// ple[t, l] = (rms(context[t, l] / sqrt(width)) * w + token[t, l]) / sqrt(2): one workgroup for each
// (layer, token); token rows come already times sqrt(ple).

struct Params {
    ple: u32,
    layers: u32,
    eps: f32,
    context_scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> context: array<f32>;
@group(0) @binding(3) var<storage, read> token: array<f32>;
@group(0) @binding(4) var<storage, read> w: array<f32>;
@group(0) @binding(5) var<storage, read_write> ple: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = (group.y * params.layers + group.x) * params.ple;
    var squares = 0.0;
    for (var i = thread; i < params.ple; i += THREADS) {
        let c = context[at + i] * params.context_scale;
        squares += c * c;
    }
    let mean = workgroup_sum(squares, thread) / f32(params.ple);
    let scale = inverseSqrt(mean + params.eps) * params.context_scale;
    for (var i = thread; i < params.ple; i += THREADS) {
        ple[at + i] = (context[at + i] * scale * w[i] + token[at + i]) * 0.7071067811865476;
    }
}
