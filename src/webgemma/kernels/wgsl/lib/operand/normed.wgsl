// x, the row that a product reads, is made by every workgroup for itself, in workgroup memory:
// x = rms(residual) * next.
// uses: row norm_weights=together kept

override THREADS: u32;

var<storage, read> residual: array<vec4<f32>>;

var<workgroup> x: array<Value, KEPT>;

fn place_of(index: u32) -> u32 {
    return kept_place(index);
}

fn prepare(group: u32, thread: u32) {
    var row: Row;
    for (var each = 0u; each < SHARE; each++) {
        row[each] = select(vec4(0.0), residual[column_of(each, thread)], is_live(each, thread));
    }
    let root = inverse_root(row, thread);
    for (var each = 0u; each < SHARE; each++) {
        let values = row[each] * root * next_weight(column_of(each, thread));
        keep(each * THREADS + thread, values, is_live(each, thread), thread);
    }
    workgroupBarrier();
}
