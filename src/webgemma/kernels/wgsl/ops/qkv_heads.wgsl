// What attention reads of the raw projections: q = rope(rms(q) * q_norm), and into the cache
// k = rope(rms(k) * k_norm) and v = rms(v). One workgroup for each token and head: first the query heads, then
// (with a cache of its own) the key heads, then the value heads.
// uses: place raw_head kv

struct Params {
    heads: u32,
    kv_heads: u32, // 0 on layers that read another layer's cache
    raw_heads: u32, // heads of a token in `raw`
    ring: u32, // positions that a slot of the cache holds
}

override THREADS: u32;

var<storage, read> rotations: array<vec2<u32>>; // revolutions per position, a 64-bit fraction
var<storage, read_write> q: array<vec4<f32>>;
var<storage, read_write> k_cache: array<KvVec4>;
var<storage, read_write> v_cache: array<KvVec4>;

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
    from_head += t * params.raw_heads;
    let size = inverse_rms(from_head, thread);
    if (t >= batch.count) {
        return;
    }
    let p = position_of(t);
    let to = (t * params.heads + head) * VEC4S;
    let line = slot_of(t) * params.ring + p % params.ring;
    let offset = (line * params.kv_heads + head) * VEC4S;
    if (kind == 2u) {
        for (var i = thread; i < VEC4S; i += THREADS) {
            v_cache[offset + i] = pack_kv(raw_vec4(from_head * VEC4S + i) * select(1.0, size, VALUE_NORM));
        }
        return;
    }
    for (var i = thread; i < HALF; i += THREADS) {
        let pair = rotated(from_head, kind, size, p, i);
        if (kind == 0u) {
            q[to + i] = pair[0];
            q[to + HALF + i] = pair[1];
        } else {
            k_cache[offset + i] = pack_kv(pair[0]);
            k_cache[offset + HALF + i] = pack_kv(pair[1]);
        }
    }
}
