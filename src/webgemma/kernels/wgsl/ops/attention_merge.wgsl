// h[t, head] = the splits of attention_decode put together: see `merged`. One workgroup for each (head, token).
// uses: batch=tokens merged store

struct Params {
    heads: u32,
}

override THREADS: u32 = 64u;

var<storage, read_write> h: array<Stored>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.y * params.heads + group.x;
    for (var begin = 0u; begin < HEAD_VEC4S; begin += THREADS) {
        let values = merged_vec4(row, min(begin + thread, HEAD_VEC4S - 1u));
        let live = begin + thread < HEAD_VEC4S && group.y < batch.count;
        store_vec4(row * HEAD_VEC4S + begin + thread, values, live, thread);
    }
}
