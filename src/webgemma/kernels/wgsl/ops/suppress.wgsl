// logits[t, id] = SUPPRESSED for the suppressed ids. A thread for each of them, row after row.

struct Params {
    vocab: u32,
    count: u32, // of the ids
}

override THREADS: u32 = 64u;

var<storage, read> suppressed: array<u32>;
var<storage, read_write> logits: array<f32>;

const SUPPRESSED: f32 = -1.0e30; // of no probability, and still a number

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = group.x * THREADS + thread;
    if (i < params.count) {
        logits[group.y * params.vocab + suppressed[i]] = SUPPRESSED;
    }
}
