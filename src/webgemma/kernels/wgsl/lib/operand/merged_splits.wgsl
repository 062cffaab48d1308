// x, the row that attention's output product reads, is made by every workgroup for itself, in workgroup memory: the
// splits of attention_decode put together, as `merged` does it.
// uses: merged kept

override THREADS: u32;
override WIDTH: u32;

var<workgroup> x: array<Value, KEPT>;

fn place_of(index: u32) -> u32 {
    return kept_place(index);
}

fn prepare(group: u32, thread: u32) {
    for (var begin = 0u; begin < WIDTH / 4u; begin += THREADS) {
        let index = begin + thread;
        let column = min(index, WIDTH / 4u - 1u);
        let merged = merged_splits(column / HEAD_VEC4S, column % HEAD_VEC4S, 0u, 1u);
        keep(index, merged.values / merged.total, index < WIDTH / 4u, thread);
    }
    workgroupBarrier();
}
