// store_next: h = rms(row) * next, the normed row that the next op reads.
// uses: residual_sum store

var<storage, read_write> h: array<Stored>;

fn following_weights(thread: u32) -> Row {
    return next_weights(0u, thread);
}

fn store_next(at: u32, sum: Row, weights: Row, thread: u32) {
    let root = inverse_root(sum, thread);
    for (var each = 0u; each < SHARE; each++) {
        let index = at + each * THREADS + thread;
        store_vec4(index, sum[each] * root * weights[each], is_live(each, thread), thread);
    }
}
