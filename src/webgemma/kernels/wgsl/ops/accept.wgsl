// A denoising step's end: which positions of the canvas keep the token that was drawn for them, and
// what the step leaves. A position is accepted if those of less entropy (of equal ones, the earlier)
// sum up to the bound at most; the others become noise. One workgroup, a thread for each position.

struct Params {
    canvas: u32,
    vocab: u32,
}

struct Left {
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

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> denoising: Denoising;
@group(0) @binding(2) var<storage, read> findings: array<Finding>;
@group(0) @binding(3) var<storage, read_write> ids: array<u32>;
@group(0) @binding(4) var<storage, read_write> left: Left;

var<workgroup> entropies: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    let live = thread < params.canvas;
    let i = min(thread, params.canvas - 1u);
    let found = findings[i];
    entropies[thread] = found.entropy;
    workgroupBarrier();
    var before = 0.0;
    for (var j = 0u; j < params.canvas; j++) {
        let other = entropies[j];
        if (other < found.entropy || (other == found.entropy && j < i)) {
            before += other;
        }
    }
    let accepted = before <= denoising.entropy_bound;
    let changed = select(0.0, 1.0, live && left.positions[i].best != found.best);
    let broken = select(0.0, 1.0, live && found.entropy < 0.0);
    let mean = workgroup_sum(select(0.0, found.entropy, live), thread) / f32(params.canvas);
    let same = workgroup_sum(changed, thread) == 0.0;
    let sound = workgroup_sum(broken, thread) == 0.0;
    if (live) {
        let id = select(position_bits(i, 0u) % params.vocab, found.sampled, accepted);
        ids[i] = id;
        left.positions[i] = Position(id, select(0u, 1u, accepted), found.best, found.logprob);
    }
    if (thread == 0u) {
        let stable = select(0u, left.stable + 1u, same);
        let sure = stable >= denoising.stability_threshold && mean < denoising.confidence_threshold;
        left.stable = stable;
        left.done = select(0u, 1u, sure || denoising.step >= denoising.steps);
        left.entropy = select(BROKEN, mean, sound);
    }
}
