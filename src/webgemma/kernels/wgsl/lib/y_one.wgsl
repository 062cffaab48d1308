// y_row: what is added to the residual, one row as it is.

@group(0) @binding(6) var<storage, read> y: array<vec4<f32>>;

fn y_row(at: u32, thread: u32) -> Row {
    var row: Row;
    for (var each = 0u; each < EACH; each++) {
        row[each] = select(vec4(0.0), y[at + four_of(each, thread)], is_live(each, thread));
    }
    return row;
}
