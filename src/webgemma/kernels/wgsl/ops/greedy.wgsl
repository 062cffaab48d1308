// The token with the highest penalised logit, the lowest id where equal. One workgroup in all.
// uses: partials token_output

struct Params {
    parts: u32, // chunks of the vocabulary
}

override THREADS: u32;

var<storage, read> partials: array<Partial>;
var<storage, read> values: array<vec2<f32>>; // penalised, own

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    let best = best_penalised(params.parts, thread);
    let total = log_total(params.parts, thread);
    if (thread == 0u) {
        output_token(best.id, values[best.id].y - total);
    }
}
