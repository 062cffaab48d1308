// The token with the highest penalised logit, the lowest id where equal. One workgroup for each row.
// uses: partials token_output

struct Params {
    parts: u32, // chunks of the vocabulary
}

override THREADS: u32;
override CHUNK: u32;

var<storage, read> partials: array<Partial>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    row = group.x;
    let best = best_penalised(params.parts, thread);
    let total = log_total(params.parts, thread);
    if (thread == 0u) {
        let own = partials[row * params.parts + best.id / CHUNK].best_own;
        output_token(slot_in(batch.rows[row]), best.id, own - total);
    }
}
