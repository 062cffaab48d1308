// added_row: what is added to the residual, one row as it is.
// uses: row

var<storage, read> addend: array<vec4<f32>>;

fn added_row(at: u32, thread: u32) -> Row {
    var row: Row;
    for (var each = 0u; each < SHARE; each++) {
        row[each] = select(vec4(0.0), addend[at + column_of(each, thread)], is_live(each, thread));
    }
    return row;
}
