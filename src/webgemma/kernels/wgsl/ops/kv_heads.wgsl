// What rows leave in the cache where they attend to each other: k = rope(rms(k) * k_norm) and v = rms(v), bit by bit as
// attention_decode makes them of one row. One workgroup for each head and row: first the key heads, then the values.
// uses: place raw_head kv

struct Params {
    heads: u32,
    kv_heads: u32,
    raw_heads: u32, // heads of a token in `raw`
    ring: u32, // positions that a slot of the cache holds
}

override THREADS: u32;

var<storage, read> rotations: array<vec2<u32>>; // see rope/fixed_point
var<storage, read_write> k_cache: array<KvVec4>;
var<storage, read_write> v_cache: array<KvVec4>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    if (t >= batch.count) {
        return;
    }
    let kv_head = group.x % params.kv_heads;
    let position = position_of(t);
    let line = slot_of(t) * params.ring + position % params.ring;
    let offset = (line * params.kv_heads + kv_head) * VEC4S;
    if (group.x < params.kv_heads) {
        let head = t * params.raw_heads + params.heads + kv_head;
        let size = inverse_rms(head, thread);
        for (var i = thread; i < HALF; i += THREADS) {
            let pair = rotated(head, 1u, size, position, i);
            k_cache[offset + i] = pack_kv(pair[0]);
            k_cache[offset + HALF + i] = pack_kv(pair[1]);
        }
        return;
    }
    let head = (t + 1u) * params.raw_heads - params.kv_heads + kv_head;
    let size = value_size(head, thread);
    for (var i = thread; i < VEC4S; i += THREADS) {
        v_cache[offset + i] = pack_kv(raw_vec4(head * VEC4S + i) * size);
    }
}
