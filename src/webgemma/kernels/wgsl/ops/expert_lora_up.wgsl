// y[s, first + n] += Σ_j B[e, n, j] low[s, j] for each slot s and its expert e: lora_up for experts. A thread takes
// a row n of a slot.
// uses: batch=tokens

struct Params {
    rows: u32,
    stride: u32, // values of y for each slot
    first: u32,
    rank_vec4s: u32,
    used: u32, // slots of a token
}

override THREADS: u32;

var<storage, read> B: array<vec4<f32>>;
var<storage, read> ids: array<u32>;
var<storage, read> low: array<vec4<f32>>;
var<storage, read_write> y: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let n = group.x * THREADS + thread;
    let s = group.y;
    if (n >= params.rows || s >= batch.count * params.used) {
        return;
    }
    let row = (ids[s] * params.rows + n) * params.rank_vec4s;
    var sum = 0.0;
    for (var j = 0u; j < params.rank_vec4s; j++) {
        let part = low[s * params.rank_vec4s + j];
        if (any(part != vec4<f32>())) { // of an adapter that is applied
            sum += dot(B[row + j], part);
        }
    }
    y[s * params.stride + params.first + n] += sum;
}
