// What attention reads of the raw projections: q = rope(rms(q) * q_norm), and into the cache
// k = rope(rms(k) * k_norm) and v = rms(v). One workgroup for each token and head: first the query heads, then
// (with a cache of its own) the key heads, then the value heads.
// uses: place workgroup_sum rope kv

struct Params {
    heads: u32,
    kv_heads: u32, // 0 on layers that read another layer's cache
    raw_heads: u32, // heads of a token in `raw`
    ring: u32, // positions that a slot of the cache holds
    eps: f32,
}

override THREADS: u32;
override HEAD_DIM: u32;

var<storage, read> raw: array<vec4<f32>>; // of a token: q, k and (unless k is v) v heads
var<storage, read> norms: array<vec4<f32>>; // q_norm, then k_norm
var<storage, read> rotations: array<vec2<u32>>; // revolutions per position, a 64-bit fraction
var<storage, read_write> q: array<vec4<f32>>;
var<storage, read_write> k_cache: array<KvVec4>;
var<storage, read_write> v_cache: array<KvVec4>;

const VEC4S: u32 = HEAD_DIM / 4u;

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
    let from_at = (t * params.raw_heads + from_head) * VEC4S;
    var squares = 0.0;
    for (var i = thread; i < VEC4S; i += THREADS) {
        let values = raw[from_at + i];
        squares += dot(values, values);
    }
    let scale = inverseSqrt(workgroup_sum(squares, thread) / f32(HEAD_DIM) + params.eps);
    if (t >= batch.count) {
        return;
    }
    let p = position_of(t);
    let half = VEC4S / 2u;
    let to = (t * params.heads + head) * VEC4S;
    let line = slot_of(t) * params.ring + p % params.ring;
    let offset = (line * params.kv_heads + head) * VEC4S;
    for (var i = thread; i < half; i += THREADS) {
        let a = raw[from_at + i] * scale;
        let b = raw[from_at + half + i] * scale;
        if (kind == 2u) {
            v_cache[offset + i] = pack_kv(a);
            v_cache[offset + half + i] = pack_kv(b);
            continue;
        }
        let rotated = rotate(a * norms[kind * VEC4S + i], b * norms[kind * VEC4S + half + i], p, i);
        if (kind == 0u) {
            q[to + i] = rotated[0];
            q[to + half + i] = rotated[1];
        } else {
            k_cache[offset + i] = pack_kv(rotated[0]);
            k_cache[offset + half + i] = pack_kv(rotated[1]);
        }
    }
}
