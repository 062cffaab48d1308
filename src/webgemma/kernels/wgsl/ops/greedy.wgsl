// The token with the highest changed logit, the lowest id where equal: one workgroup in all.

struct Params {
    parts: u32,
    ring: u32, // of `tokens`
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> partials: array<Partial>;
@group(0) @binding(6) var<storage, read> values: array<vec2<f32>>; // changed, own

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    let best = best_changed(params.parts, thread);
    let total = log_total(params.parts, thread);
    if (thread == 0u) {
        take(best.id, values[best.id].y - total);
    }
}
