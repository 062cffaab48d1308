// x, the rows that a product reads, one for each of TOKENS tokens, are made by every workgroup for itself, in
// workgroup memory: sum = (residual + rms(added) * post) * scale, x = rms(sum) * next, or the sum itself (NORMED false). The first
// workgroup stores the sum. The slot `added` says what is added.
// uses: residual_sum norm_weights=together kept

override THREADS: u32;
override TOKENS: u32 = 1u;
override NORMED: bool;

var<storage, read> residual: array<vec4<f32>>;
var<storage, read_write> summed: array<vec4<f32>>;

var<workgroup> x: array<Value, KEPT>;

fn place_of(index: u32) -> u32 {
    return kept_place(index);
}

// The sum of a token whose row begins at `at`.
fn make_sum(at: u32, group: u32, thread: u32) -> Row {
    // All reads are requested before anything is waited for.
    var row = Row();
    for (var each = 0u; each < SHARE; each++) {
        row[each] = select(vec4(0.0), residual[at + column_of(each, thread)], is_live(each, thread));
    }
    row = residual_sum(at, row, thread);
    for (var each = 0u; each < SHARE; each++) {
        if (group == 0u && is_live(each, thread)) {
            summed[at + column_of(each, thread)] = row[each];
        }
    }
    return row;
}

fn prepare(group: u32, thread: u32) {
    let weights = next_weights(0u, thread);
    for (var t = 0u; t < TOKENS; t++) {
        var row = make_sum(t * VEC4S, group, thread);
        if (NORMED) {
            let root = inverse_root(row, thread);
            for (var each = 0u; each < SHARE; each++) {
                row[each] = row[each] * root * weights[each]; // in the order of next_norms
            }
        }
        for (var each = 0u; each < SHARE; each++) {
            keep(t * VEC4S + each * THREADS + thread, row[each], is_live(each, thread), thread);
        }
    }
    workgroupBarrier();
}
