// out[t] = sum over s of softmax(cap tanh(score / cap)) v[t - s] for the REACH last positions,
// score = (q[t] * q_scale) . (k_scale k[t - s] + r[s]), r the keys of the distances; q, k, v and out are each clamped to
// bounds. One workgroup for each head and TOKENS tokens: first a thread computes the score of one token and one
// distance, then it sums vec4s of v.
// uses: batch=tokens clamped finite

struct Params {
    heads: u32,
    k_scale: f32,
    q_low: f32,
    q_high: f32,
    k_low: f32,
    k_high: f32,
    v_low: f32,
    v_high: f32,
    low: f32,
    high: f32,
}

override THREADS: u32;
override HEAD_DIM: u32;
override TOKENS: u32;

var<storage, read> raw: array<vec4<f32>>; // of a token: q, k and v heads
var<storage, read> q_scale: array<vec4<f32>>;
var<storage, read> r: array<vec4<f32>>; // of a distance: its heads
var<storage, read_write> out: array<vec4<f32>>;

const VEC4S: u32 = HEAD_DIM / 4u;
const REACH: u32 = 12u;
const CAP: f32 = 50.0;

var<workgroup> scores: array<f32, TOKENS * REACH>;

// Where the vec4s of a head of a token begin; kind is 0 for queries, 1 for keys, 2 for values.
fn start(t: u32, kind: u32, head: u32) -> u32 {
    return ((t * 3u + kind) * params.heads + head) * VEC4S;
}

fn score(t: u32, s: u32, head: u32) -> f32 {
    let q = start(t, 0u, head);
    let k = start(t - s, 1u, head);
    let distance = (s * params.heads + head) * VEC4S;
    var sum = 0.0;
    for (var i = 0u; i < VEC4S; i++) {
        let query = clamped4(raw[q + i], params.q_low, params.q_high) * q_scale[i];
        let key = clamped4(raw[k + i], params.k_low, params.k_high) * params.k_scale;
        sum += dot(query, key + r[distance + i]);
    }
    let nan = bitcast<f32>(bitcast<u32>(sum) | 0x7fc00000u); // of damaged weights
    return select(nan, CAP * tanh(clamp(sum / CAP, -15.0, 15.0)), is_finite(sum));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = group.x;
    let first = group.y * TOKENS;
    for (var i = thread; i < TOKENS * REACH; i += THREADS) {
        let t = first + i / REACH;
        let s = i % REACH;
        if (t < batch.count && s <= t) {
            scores[i] = score(t, s, head);
        }
    }
    workgroupBarrier();
    for (var i = thread; i < TOKENS * VEC4S; i += THREADS) {
        let token = i / VEC4S;
        let t = first + token;
        if (t >= batch.count) {
            continue;
        }
        let own = token * REACH;
        let reach = min(REACH, t + 1u);
        var highest = scores[own];
        for (var s = 1u; s < reach; s++) {
            highest = max(highest, scores[own + s]);
        }
        var total = 0.0;
        var sum = vec4(0.0);
        for (var s = 0u; s < reach; s++) {
            let weight = exp(scores[own + s] - highest);
            let value = raw[start(t - s, 2u, head) + i % VEC4S];
            total += weight;
            sum += weight * clamped4(value, params.v_low, params.v_high);
        }
        let at = (t * params.heads + head) * VEC4S + i % VEC4S;
        out[at] = clamped4(sum / total, params.low, params.high);
    }
}
