// next_weights: a thread's vec4s of the first vector of `next`, requested before anything is waited for.

var<storage, read> next: array<vec4<f32>>;

fn next_weights(thread: u32) -> Row {
    var row: Row;
    for (var each = 0u; each < EACH; each++) {
        row[each] = next[column_of(each, thread)];
    }
    return row;
}
