// For one query q of one head, from dout, with its probabilities computed again: p = softmax(q kᵀ),
// D = Σ p (dout · v), dq = Σ p (dout · v - D) k. Leaves ln Σ exp(q · k) and D for the keys' turn.
// A workgroup for each head and token: a thread takes a key, then four dimensions of dq.

struct Params {
    heads: u32,
    kv_heads: u32,
    window: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> spans: array<vec2<u32>>; // where each token's text is
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> k: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> v: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> dout: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> dq: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> sums: array<vec2<f32>>;

const FOURS: u32 = HEAD_DIM / 4u;
const FAR: f32 = -3e38;

var<workgroup> shares: array<f32, THREADS>;

// The score q · k and dout · v.
fn dots(at: u32, key: u32) -> vec2<f32> {
    var both = vec2(0.0);
    for (var i = 0u; i < FOURS; i++) {
        both += vec2(dot(q[at + i], k[key + i]), dot(dout[at + i], v[key + i]));
    }
    return both;
}

fn workgroup_max(value: f32, thread: u32) -> f32 {
    workgroupBarrier();
    shares[thread] = value;
    workgroupBarrier();
    var highest = FAR;
    for (var i = 0u; i < THREADS; i++) {
        highest = max(highest, shares[i]);
    }
    return highest;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let head = group.x / (params.heads / params.kv_heads);
    let at = (t * params.heads + group.x) * FOURS;
    let span = spans[t];
    if (t >= span.y) {
        return; // beyond the last text
    }
    let first = max(span.x, t - min(t, params.window - 1u));
    var peak = FAR;
    var total = 0.0;
    var weighed = 0.0;
    for (var s = first + thread; s <= t; s += THREADS) {
        let both = dots(at, (s * params.kv_heads + head) * FOURS);
        let higher = max(peak, both.x);
        let shrink = exp(peak - higher);
        let power = exp(both.x - higher);
        total = total * shrink + power;
        weighed = weighed * shrink + power * both.y;
        peak = higher;
    }
    let highest = workgroup_max(peak, thread);
    let shrink = exp(peak - highest);
    let sum = workgroup_sum(total * shrink, thread);
    let mean = workgroup_sum(weighed * shrink, thread) / sum;
    let level = highest + log(sum);
    if (thread == 0u) {
        sums[t * params.heads + group.x] = vec2(level, mean);
    }
    var gradient = vec4(0.0);
    for (var base = first; base <= t; base += THREADS) {
        let s = base + thread;
        var ds = 0.0;
        if (s <= t) {
            let both = dots(at, (s * params.kv_heads + head) * FOURS);
            ds = exp(both.x - level) * (both.y - mean);
        }
        workgroupBarrier();
        shares[thread] = ds;
        workgroupBarrier();
        if (thread < FOURS) {
            for (var j = 0u; j < min(THREADS, t + 1u - base); j++) {
                gradient += shares[j] * k[((base + j) * params.kv_heads + head) * FOURS + thread];
            }
        }
    }
    if (thread < FOURS) {
        dq[at + thread] = gradient;
    }
}
