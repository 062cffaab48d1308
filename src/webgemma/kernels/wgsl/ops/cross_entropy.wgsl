// For each row of raw logits z: loss = -ln p[target], p = softmax(cap tanh(z / cap)), and in place of
// z what it owes: dz = weights[row] (p - [target]) (1 - tanh²). One workgroup for each row.

struct Params {
    vocab: u32,
    cap: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> targets: array<u32>;
@group(0) @binding(3) var<storage, read> weights: array<f32>;
@group(0) @binding(4) var<storage, read_write> z: array<f32>;
@group(0) @binding(5) var<storage, read_write> losses: array<f32>;

fn bent(value: f32) -> f32 {
    return tanh(clamp(value / params.cap, -15.0, 15.0)); // tanh of large numbers may overflow
}

// The cap bounds the logits, so that the sum of their powers needs no maximum taken off but the cap.
@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.x;
    let at = t * params.vocab;
    var powers = 0.0;
    var largest = -params.cap;
    for (var i = thread; i < params.vocab; i += THREADS) {
        largest = max(largest, params.cap * bent(z[at + i]));
    }
    let peak = workgroup_max(largest, thread);
    for (var i = thread; i < params.vocab; i += THREADS) {
        powers += exp(params.cap * bent(z[at + i]) - peak);
    }
    let sum = workgroup_sum(powers, thread);
    if (t >= state.count) {
        return;
    }
    let target_token = targets[t];
    if (thread == 0u) {
        losses[t] = log(sum) + peak - params.cap * bent(z[at + target_token]);
    }
    storageBarrier();
    workgroupBarrier();
    for (var i = thread; i < params.vocab; i += THREADS) {
        let b = bent(z[at + i]);
        let p = exp(params.cap * b - peak) / sum;
        z[at + i] = weights[t] * (p - select(0.0, 1.0, i == target_token)) * (1.0 - b * b);
    }
}

var<workgroup> peaks: array<f32, THREADS>;

fn workgroup_max(value: f32, thread: u32) -> f32 {
    peaks[thread] = value;
    for (var half = THREADS / 2u; half > 0u; half = half / 2u) {
        workgroupBarrier();
        if (thread < half) {
            peaks[thread] = max(peaks[thread], peaks[thread + half]);
        }
    }
    workgroupBarrier();
    return peaks[0];
}
