// stats[position] of a canvas, from its row of logits. One workgroup per position. The draw is by Gumbel noise: the
// largest z + g, g = -log(-log(1 - w)) with an independent random w in (0, 1) for each token.
// uses: denoising position_stats finite workgroup_best workgroup_sum random

struct Params {
    vocab: u32,
    first: u32, // position of the first row
}

override THREADS: u32;

var<storage, read> logits: array<f32>; // [rows, vocab]
var<storage, read_write> stats: array<PositionStats>;

// -log(1 - w) by its series where 1 - w would round.
fn gumbel(random: u32) -> f32 {
    let w = (f32(random) + 0.5) * 2.3283064365386963e-10; // 2^-32
    let series = w * (1.0 + w * (0.5 + w * (1.0 / 3.0 + w * 0.25)));
    return -log(select(-log(max(1.0 - w, 5.9604645e-8)), series, w < 0.01));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = group.x * params.vocab;
    var top = Best(LOWEST, NO_ID);
    var broken = 0.0;
    for (var id = thread; id < params.vocab; id += THREADS) {
        let logit = logits[at + id];
        if (is_finite(logit)) {
            top = better(top, Best(logit, id));
        } else {
            broken = 1.0;
        }
    }
    let best = workgroup_best(top, thread);
    let key = position_bits(params.first + group.x, 1u);
    var drawn = Best(LOWEST, NO_ID);
    var total = 0.0;
    var inner = 0.0; // the sum of e z
    var own = 0.0; // of exp at temperature 1
    for (var id = thread; id < params.vocab; id += THREADS) {
        let below = logits[at + id] - best.value;
        let z = below * denoising.inverse_temperature;
        let e = exp(z);
        total += e;
        inner += e * z;
        own += exp(below);
        drawn = better(drawn, Best(z + gumbel(next_bits(key, id)), id));
    }
    let sampled = workgroup_best(drawn, thread);
    let sum = workgroup_sum(total, thread);
    let inner_sum = workgroup_sum(inner, thread);
    let own_sum = workgroup_sum(own, thread);
    let is_broken = workgroup_sum(broken, thread) > 0.0;
    if (thread == 0u) {
        let entropy = max(log(sum) - inner_sum / sum, 0.0);
        stats[params.first + group.x] = PositionStats(
            best.id,
            sampled.id,
            best.value,
            sum,
            select(entropy, NOT_FINITE, is_broken),
            -log(own_sum),
        );
    }
}
