// store_next: h = rms(row) * next, clamped to bounds, a row at once, so that it can be rounded for matrix units.
// uses: residual_sum clamped store_whole

struct Params {
    low: f32,
    high: f32,
}

fn following_weights(thread: u32) -> Row {
    return next_weights(0u, thread);
}

fn store_next(at: u32, sum: Row, weights: Row, thread: u32) {
    let root = inverse_root(sum, thread);
    var normed: Row;
    for (var each = 0u; each < SHARE; each++) {
        normed[each] = clamped4(sum[each] * root * weights[each], params.low, params.high);
    }
    store_whole(at / VEC4S, normed, thread);
}
