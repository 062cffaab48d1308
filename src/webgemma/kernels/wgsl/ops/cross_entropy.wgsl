// The loss of row t, -ln softmax(l)[target] for l = cap * tanh(z / cap), and in place of z its gradient,
// dz = (softmax(l) - [target]) (1 - tanh(z / cap)^2) * loss_weight. A row without a target has a loss and a
// gradient of zero; the loss of one whose z are not all finite is NaN, for the host to see. One workgroup per
// row.
// uses: training_step finite softcap workgroup_sum workgroup_max

struct Params {
    vocab: u32,
    first: u32, // row of z's first, among targets and losses
    nan: f32,
}

override THREADS: u32;

var<storage, read> targets: array<u32>;
var<storage, read_write> z: array<f32>;
var<storage, read_write> losses: array<f32>;

const NO_TARGET: u32 = 0xffffffffu;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = group.x * params.vocab;
    let t = params.first + group.x;
    let target_id = targets[t];
    let live = target_id != NO_TARGET;
    var best = -3.0e38;
    var broken = 0.0;
    for (var i = thread; i < params.vocab; i += THREADS) {
        best = max(best, z[at + i]);
        broken += select(1.0, 0.0, is_finite(z[at + i]));
    }
    broken = workgroup_sum(broken, thread);
    best = softcapped(workgroup_max(best, thread)); // tanh is monotonic
    var sum = 0.0;
    for (var i = thread; i < params.vocab; i += THREADS) {
        sum += exp(softcapped(z[at + i]) - best);
    }
    let total = workgroup_sum(sum, thread);
    if (thread == 0u) {
        let own = softcapped(z[at + select(0u, target_id, live)]);
        let loss = select(best + log(total) - own, params.nan, broken > 0.0);
        losses[t] = select(0.0, loss, live);
    }
    workgroupBarrier(); // z of the target has been read
    for (var i = thread; i < params.vocab; i += THREADS) {
        let bent = bend(z[at + i]);
        let p = exp(softcapped(z[at + i]) - best) / total - select(0.0, 1.0, i == target_id);
        z[at + i] = select(0.0, p * (1.0 - bent * bent) * training_step.loss_weight, live);
    }
}
