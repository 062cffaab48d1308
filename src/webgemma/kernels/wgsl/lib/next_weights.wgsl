// next_weights: a thread's fours of the first vector of `next`, asked for before anybody waits.

fn next_weights(thread: u32) -> Row {
    var row: Row;
    for (var each = 0u; each < EACH; each++) {
        row[each] = next[four_of(each, thread)];
    }
    return row;
}
