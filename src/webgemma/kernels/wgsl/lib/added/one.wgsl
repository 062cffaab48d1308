// added_row: what is added to the residual, one row as it is. The product that it comes from may leave its sums over
// ADDED_SPLITS parts of k, one after the other.
// uses: row

override ADDED_SPLITS: u32 = 1u;

var<storage, read> addend: array<vec4<f32>>;

fn added_row(at: u32, thread: u32) -> Row {
    let vec4s = arrayLength(&addend) / ADDED_SPLITS; // of a split
    var row: Row;
    for (var each = 0u; each < SHARE; each++) {
        let i = at + column_of(each, thread);
        var sum = addend[i];
        for (var split = 1u; split < ADDED_SPLITS; split++) {
            sum += addend[split * vec4s + i];
        }
        row[each] = select(vec4(0.0), sum, is_live(each, thread));
    }
    return row;
}
