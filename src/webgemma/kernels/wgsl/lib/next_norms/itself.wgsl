// store_next: h = the row itself, at once, so that it can be rounded for matrix units.
// uses: row store_whole

fn following_weights(thread: u32) -> Row {
    return Row();
}

fn store_next(at: u32, sum: Row, weights: Row, thread: u32) {
    store_whole(at / VEC4S, sum, thread);
}
