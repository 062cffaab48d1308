// put_next: of the row's rms norm, h = normed * next.

fn put_next(at: u32, sum: Row, weights: Row, thread: u32) {
    let root = inverse_root(sum, thread);
    for (var each = 0u; each < EACH; each++) {
        let place = at + each * THREADS + thread;
        put_four(place, sum[each] * root * weights[each], is_live(each, thread), thread);
    }
}
