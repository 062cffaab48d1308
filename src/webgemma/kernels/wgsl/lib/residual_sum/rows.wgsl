// residual_sum: (old + rms(added) * post) * scale. next_weights: a thread's share of a norm that follows, requested
// before anything is waited for.
// uses: row added norm_weights

fn residual_sum(at: u32, old: Row, thread: u32) -> Row {
    var sum = old;
    var weights: Row;
    for (var each = 0u; each < SHARE; each++) {
        weights[each] = post_weight(column_of(each, thread));
    }
    let y = added_row(at, thread);
    let factor = output_scale();
    let root = inverse_root(y, thread);
    for (var each = 0u; each < SHARE; each++) {
        sum[each] = (sum[each] + y[each] * root * weights[each]) * factor;
    }
    return sum;
}

fn next_weights(norm: u32, thread: u32) -> Row {
    var weights: Row;
    for (var each = 0u; each < SHARE; each++) {
        weights[each] = next_weight(norm * VEC4S + column_of(each, thread));
    }
    return weights;
}
