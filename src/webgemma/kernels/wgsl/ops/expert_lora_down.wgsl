// low[s, r] = c Σ_k A[e, r, k] x[s / fan, k] for each slot s, one of the experts of a token, and its expert e, where c
// is the scale of rank r's adapter in the conversation of the token: lora_down for experts. A workgroup takes EACH
// ranks r of a slot.
// uses: place lora_scale lane_sum input_vec4

struct Params {
    vec4s: u32, // of a row of x and of A
    ranks: u32,
    used: u32, // slots of a token
    fan: u32, // slots that share a row of x
}

override THREADS: u32;
override LANES: u32;
override EACH: u32;

var<storage, read> A: array<vec4<f32>>;
var<storage, read> columns: array<u32>; // of EACH ranks
var<storage, read> ids: array<u32>;
var<storage, read_write> low: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let s = group.y;
    if (s >= batch.count * params.used) {
        return;
    }
    let first = group.x * EACH;
    let scale = lora_scale(s / params.used, columns[group.x]);
    var sums: array<f32, EACH>;
    for (var i = select(thread, params.vec4s, scale == 0.0); i < params.vec4s; i += LANES) {
        let values = vec4_of(s / params.fan, i);
        for (var each = 0u; each < EACH; each++) {
            let row = ids[s] * params.ranks + first + each;
            sums[each] += dot(A[row * params.vec4s + i], values);
        }
    }
    for (var each = 0u; each < EACH; each++) {
        let sum = lane_sum(sums[each], thread);
        if (thread == 0u) {
            low[s * params.ranks + first + each] = scale * sum;
        }
    }
}
