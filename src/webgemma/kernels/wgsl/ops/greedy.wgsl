// The token with the highest penalised logit, the lowest id where equal. One workgroup for each row.
// uses: partials token_output

struct Params {
    parts: u32, // chunks of the vocabulary
    vocab: u32,
}

override THREADS: u32;

var<storage, read> partials: array<Partial>;
var<storage, read> values: array<vec2<f32>>; // of each token of a row: penalised, own

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    row = group.x;
    let best = best_penalised(params.parts, thread);
    let total = log_total(params.parts, thread);
    if (thread == 0u) {
        output_token(batch.slots[row], best.id, values[row * params.vocab + best.id].y - total);
    }
}
