// store_next: rms(row) times each of three vectors of next, for the branches of a layer with experts: n for
// the dense branch; m for the experts, in n's form if ALIKE; s for the router. m and s come later in h, m_first
// and s_first vec4s from its beginning.
// uses: residual_sum norm_weights store

struct Params {
    m_first: u32,
    s_first: u32,
}

override ALIKE: bool;

var<storage, read_write> h: array<Stored>;

fn following_weights(thread: u32) -> Row {
    return next_weights(0u, thread);
}

fn store_next(at: u32, sum: Row, weights: Row, thread: u32) {
    let root = inverse_root(sum, thread);
    for (var each = 0u; each < SHARE; each++) {
        let live = is_live(each, thread);
        let index = at + each * THREADS + thread;
        let column = column_of(each, thread);
        let normed = sum[each] * root;
        let m = normed * next_weight(VEC4S + column);
        store_vec4(index, normed * weights[each], live, thread);
        if (ALIKE) {
            store_vec4(params.m_first + index, m, live, thread);
        } else if (live) {
            store_floats(params.m_first + index, m);
        }
        if (live) {
            store_floats(params.s_first + index, normed * next_weight(2u * VEC4S + column));
        }
    }
}
