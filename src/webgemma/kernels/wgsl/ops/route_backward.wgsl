// The backward pass of a token's shares, p scale[id] with p the softmax of the chosen scores alone: with
// u = dshares scale[id], dscores[id] = p (u - sum p u); the choice itself has no gradient, nor have the scores of
// the others. One thread per token.

struct Params {
    experts: u32,
    used: u32,
    scale_step: u32, // 0: one scale for all
    tokens: u32,
}

override THREADS: u32 = 64u;

var<storage, read> scores: array<f32>;
var<storage, read> scale: array<f32>;
var<storage, read> ids: array<u32>;
var<storage, read> dshares: array<f32>;
var<storage, read_write> dscores: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.x * THREADS + thread;
    if (t >= params.tokens) {
        return;
    }
    let row = t * params.experts;
    let slots = t * params.used;
    for (var i = 0u; i < params.experts; i++) {
        dscores[row + i] = 0.0;
    }
    let best = scores[row + ids[slots]]; // the first chosen has the largest
    var total = 0.0;
    var mean = 0.0;
    for (var i = 0u; i < params.used; i++) {
        let id = ids[slots + i];
        let part = exp(scores[row + id] - best);
        total += part;
        mean += part * dshares[slots + i] * scale[id * params.scale_step];
    }
    mean /= total;
    for (var i = 0u; i < params.used; i++) {
        let id = ids[slots + i];
        let p = exp(scores[row + id] - best) / total;
        dscores[row + id] = p * (dshares[slots + i] * scale[id * params.scale_step] - mean);
    }
}
