// For one key k and value v of a head, over all queries that see them: p = exp(q · k - level),
// dv = Σ p dout, dk = Σ p (dout · v - D) q. Both are added to what other layers owe them.
// A workgroup for each key-value head and token: a thread takes a query, then four dimensions.

struct Params {
    heads: u32,
    kv_heads: u32,
    window: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> k: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> v: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> dout: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> sums: array<vec2<f32>>; // level and D: attention_back_query
@group(0) @binding(6) var<storage, read> spans: array<vec2<u32>>;
@group(0) @binding(7) var<storage, read_write> dk: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read_write> dv: array<vec4<f32>>;

const FOURS: u32 = HEAD_DIM / 4u;

var<workgroup> shares: array<vec2<f32>, THREADS>; // of a query: p and p (dout · v - D)

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let s = group.y;
    let span = spans[s];
    if (s >= span.y) {
        return; // beyond the last text
    }
    let each = params.heads / params.kv_heads; // queries of a token that see this key
    let count = min(span.y - s, params.window) * each;
    let key = (s * params.kv_heads + group.x) * FOURS;
    var key_sum = vec4(0.0);
    var value_sum = vec4(0.0);
    for (var base = 0u; base < count; base += THREADS) {
        let mine = base + thread;
        var both = vec2(0.0);
        if (mine < count) {
            let row = (s + mine / each) * params.heads + group.x * each + mine % each;
            var dots = vec2(0.0);
            for (var i = 0u; i < FOURS; i++) {
                let at = row * FOURS + i;
                dots += vec2(dot(q[at], k[key + i]), dot(dout[at], v[key + i]));
            }
            let p = exp(dots.x - sums[row].x);
            both = vec2(p, p * (dots.y - sums[row].y));
        }
        workgroupBarrier();
        shares[thread] = both;
        workgroupBarrier();
        if (thread < FOURS) {
            for (var j = 0u; j < min(THREADS, count - base); j++) {
                let other = base + j;
                let row = (s + other / each) * params.heads + group.x * each + other % each;
                value_sum += shares[j].x * dout[row * FOURS + thread];
                key_sum += shares[j].y * q[row * FOURS + thread];
            }
        }
    }
    if (thread < FOURS) {
        dk[key + thread] += key_sum;
        dv[key + thread] += value_sum;
    }
}
