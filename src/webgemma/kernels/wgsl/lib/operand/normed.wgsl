// x, the rows that a product reads, one for each of TOKENS tokens, are made by every workgroup for itself, in
// workgroup memory: x = rms(residual) * next.
// uses: row norm_weights=together kept

override THREADS: u32;
override TOKENS: u32 = 1u;

var<storage, read> residual: array<vec4<f32>>;

var<workgroup> x: array<Value, KEPT>;

fn place_of(index: u32) -> u32 {
    return kept_place(index);
}

fn prepare(group: u32, thread: u32) {
    for (var t = 0u; t < TOKENS; t++) {
        let at = t * VEC4S;
        var row = Row();
        for (var each = 0u; each < SHARE; each++) {
            row[each] = select(vec4(0.0), residual[at + column_of(each, thread)], is_live(each, thread));
        }
        let root = inverse_root(row, thread);
        for (var each = 0u; each < SHARE; each++) {
            let values = row[each] * root * next_weight(column_of(each, thread));
            keep(at + each * THREADS + thread, values, is_live(each, thread), thread);
        }
    }
    workgroupBarrier();
}
