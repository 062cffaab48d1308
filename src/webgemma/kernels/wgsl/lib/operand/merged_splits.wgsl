// x, the rows that attention's output product reads, one for each of TOKENS tokens, are made by every workgroup for itself, in workgroup memory: the
// splits of attention_decode put together, as `merged` does it.
// uses: merged kept

override THREADS: u32;
override WIDTH: u32;
override TOKENS: u32 = 1u;

var<workgroup> x: array<Value, KEPT>;

fn place_of(index: u32) -> u32 {
    return kept_place(index);
}

fn prepare(group: u32, thread: u32) {
    let vec4s = WIDTH / 4u;
    for (var t = 0u; t < TOKENS; t++) {
        for (var begin = 0u; begin < vec4s; begin += THREADS) {
            let index = begin + thread;
            let column = t * vec4s + min(index, vec4s - 1u);
            let merged = merged_splits(column / HEAD_VEC4S, column % HEAD_VEC4S, 0u, 1u);
            keep(t * vec4s + index, merged.values / merged.total, index < vec4s, thread);
        }
    }
    workgroupBarrier();
}
