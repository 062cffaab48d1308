// x[t, i] += factor Σ_j B[i, j] s A[id of t, j], where s is the scale of rank j's adapter in the conversation of t: what
// LoRA adapters add to an embedding. A workgroup for each token and THREADS of its values.
// uses: token_ids lora_scale

struct Params {
    width: u32,
    rank_vec4s: u32,
    factor: f32,
}

override THREADS: u32 = 64u;

var<storage, read> A: array<vec4<f32>>;
var<storage, read> B: array<vec4<f32>>;
var<storage, read> columns: array<u32>; // of four ranks
var<storage, read_write> x: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = group.x * THREADS + thread;
    let t = group.y;
    if (t >= batch.count || i >= params.width) {
        return;
    }
    let token = id_of(t) * params.rank_vec4s;
    var sum = 0.0;
    for (var j = 0u; j < params.rank_vec4s; j++) {
        let scale = lora_scale(t, columns[j]);
        if (scale != 0.0) {
            sum += dot(B[i * params.rank_vec4s + j], scale * A[token + j]);
        }
    }
    x[t * params.width + i] += params.factor * sum;
}
