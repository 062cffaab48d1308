// The loss of row t, -ln softmax(l)[target] for l = cap * tanh(z / cap), and in place of z its gradient,
// dz = (softmax(l) - [target]) (1 - tanh(z / cap)^2) * weight. A row without a target has none of either;
// one whose z are not all finite loses NaN, for the host to see. One workgroup for each row.

struct Params {
    vocab: u32,
    first: u32, // row of z's first, among targets and losses
    cap: f32,
    nan: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> pace: Pace;
@group(0) @binding(2) var<storage, read> targets: array<u32>;
@group(0) @binding(3) var<storage, read_write> z: array<f32>;
@group(0) @binding(4) var<storage, read_write> losses: array<f32>;

const NONE: u32 = 0xffffffffu;

// tanh overflows on some devices far from zero.
fn bend(value: f32) -> f32 {
    return tanh(clamp(value / params.cap, -15.0, 15.0));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = group.x * params.vocab;
    let t = params.first + group.x;
    let target_id = targets[t];
    let live = target_id != NONE;
    var best = -3.0e38;
    var broken = 0.0;
    for (var i = thread; i < params.vocab; i += THREADS) {
        best = max(best, z[at + i]);
        broken += select(1.0, 0.0, is_finite(z[at + i]));
    }
    broken = workgroup_sum(broken, thread);
    best = params.cap * bend(workgroup_max(best, thread)); // tanh rises
    var sum = 0.0;
    for (var i = thread; i < params.vocab; i += THREADS) {
        sum += exp(params.cap * bend(z[at + i]) - best);
    }
    let total = workgroup_sum(sum, thread);
    if (thread == 0u) {
        let own = params.cap * bend(z[at + select(0u, target_id, live)]);
        let loss = select(best + log(total) - own, params.nan, broken > 0.0);
        losses[t] = select(0.0, loss, live);
    }
    workgroupBarrier(); // z of the target has been read
    for (var i = thread; i < params.vocab; i += THREADS) {
        let bent = bend(z[at + i]);
        let p = exp(params.cap * bent - best) / total - select(0.0, 1.0, i == target_id);
        z[at + i] = select(0.0, p * (1.0 - bent * bent) * pace.weight, live);
    }
}
