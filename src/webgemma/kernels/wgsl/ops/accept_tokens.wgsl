// The end of a denoising step: which positions of the canvas keep the token that was drawn for them, and what
// the step leaves. A position is accepted if those of less entropy (of equal ones, the earlier) sum up to the
// bound at most; the others become noise again. One workgroup, a thread for each position.
// uses: denoising position_stats workgroup_sum

struct Params {
    canvas: u32, // positions
    vocab: u32,
}

struct CanvasResult {
    stable: u32, // steps for which the likeliest tokens have stayed the same
    done: u32,
    entropy: f32, // the mean; below 0 where a logit was not finite
    reserved: u32,
    positions: array<Position>,
}

struct Position {
    id: u32,
    accepted: u32,
    best: u32,
    logprob: f32,
}

override THREADS: u32;

var<storage, read> stats: array<PositionStats>;
var<storage, read_write> ids: array<u32>;
var<storage, read_write> result: CanvasResult;

var<workgroup> entropies: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    let live = thread < params.canvas;
    let i = min(thread, params.canvas - 1u);
    let own = stats[i];
    entropies[thread] = own.entropy;
    workgroupBarrier();
    var before = 0.0;
    for (var j = 0u; j < params.canvas; j++) {
        let other = entropies[j];
        if (other < own.entropy || (other == own.entropy && j < i)) {
            before += other;
        }
    }
    let accepted = before <= denoising.entropy_bound;
    let changed = select(0.0, 1.0, live && result.positions[i].best != own.best);
    let broken = select(0.0, 1.0, live && own.entropy < 0.0);
    let mean = workgroup_sum(select(0.0, own.entropy, live), thread) / f32(params.canvas);
    let same = workgroup_sum(changed, thread) == 0.0;
    let finite = workgroup_sum(broken, thread) == 0.0;
    if (live) {
        let id = select(position_bits(i, 0u) % params.vocab, own.sampled, accepted);
        ids[i] = id;
        result.positions[i] = Position(id, select(0u, 1u, accepted), own.best, own.logprob);
    }
    if (thread == 0u) {
        let stable = select(0u, result.stable + 1u, same);
        let sure = stable >= denoising.stability_threshold && mean < denoising.confidence_threshold;
        result.stable = stable;
        result.done = select(0u, 1u, sure || denoising.step >= denoising.steps);
        result.entropy = select(NOT_FINITE, mean, finite);
    }
}
