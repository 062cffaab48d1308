// logits[t, id] = UNHEARD for the ids that must not come: a thread for each of them, row after row.

struct Params {
    vocab: u32,
    count: u32, // of the ids
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> silent: array<u32>;
@group(0) @binding(2) var<storage, read_write> logits: array<f32>;

const UNHEARD: f32 = -1.0e30; // of no probability, and still a number

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = group.x * THREADS + thread;
    if (i < params.count) {
        logits[group.y * params.vocab + silent[i]] = UNHEARD;
    }
}
