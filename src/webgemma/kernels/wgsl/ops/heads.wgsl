// What attention needs of the raw projections: q = rope(rms(q) * q_norm), and into the cache
// k = rope(rms(k) * k_norm) and v = rms(v). One workgroup for each token and head: first the query
// heads, then (with a cache of its own) the key heads, then the value heads.

struct Params {
    heads: u32,
    kv_heads: u32, // 0 on layers that read another layer's cache
    raw_heads: u32, // heads of a token in `raw`
    ring: u32, // positions the cache holds
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> raw: array<vec4<f32>>; // of a token: q, k and (unless k is v) v heads
@group(0) @binding(3) var<storage, read> norms: array<vec4<f32>>; // q_norm, then k_norm
@group(0) @binding(4) var<storage, read> turns: array<vec2<u32>>; // turns per position, a 64-bit fraction
@group(0) @binding(5) var<storage, read_write> q: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> k_cache: array<KvFour>;
@group(0) @binding(7) var<storage, read_write> v_cache: array<KvFour>;

const FOURS: u32 = HEAD_DIM / 4u;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    var head = group.x; // among its kind
    var kind = 0u; // query, key, value
    var from_head = head;
    if (head >= params.heads) {
        kind = 1u + (head - params.heads) / params.kv_heads;
        head = (head - params.heads) % params.kv_heads;
        from_head = params.heads + head;
        if (kind == 2u) {
            from_head = params.raw_heads - params.kv_heads + head;
        }
    }
    let from_at = (t * params.raw_heads + from_head) * FOURS;
    var squares = 0.0;
    for (var i = thread; i < FOURS; i += THREADS) {
        let four = raw[from_at + i];
        squares += dot(four, four);
    }
    let scale = inverseSqrt(workgroup_sum(squares, thread) / f32(HEAD_DIM) + params.eps);
    if (t >= state.count) {
        return;
    }
    let p = state.first + t;
    let half = FOURS / 2u;
    let to = (t * params.heads + head) * FOURS;
    let slot = (p % params.ring * params.kv_heads + head) * FOURS;
    for (var i = thread; i < half; i += THREADS) {
        let a = raw[from_at + i] * scale;
        let b = raw[from_at + half + i] * scale;
        if (kind == 2u) {
            v_cache[slot + i] = pack_kv(a);
            v_cache[slot + half + i] = pack_kv(b);
            continue;
        }
        let turned = rotated(a * norms[kind * FOURS + i], b * norms[kind * FOURS + half + i], p, i);
        if (kind == 0u) {
            q[to + i] = turned[0];
            q[to + half + i] = turned[1];
        } else {
            k_cache[slot + i] = pack_kv(turned[0]);
            k_cache[slot + half + i] = pack_kv(turned[1]);
        }
    }
}
