// put_next: of the row's rms norm, what the branches of a layer with experts read, each normed * a vector
// of next: n for the dense one; m for the experts, ALIKE 1: stored as n is; s for the router. m and s lie
// further on in h, m_place and s_place fours from its beginning.

fn put_next(at: u32, sum: Row, weights: Row, thread: u32) {
    let root = inverse_root(sum, thread);
    for (var each = 0u; each < EACH; each++) {
        let live = is_live(each, thread);
        let place = at + each * THREADS + thread;
        let four = four_of(each, thread);
        let normed = sum[each] * root;
        let m = normed * next[FOURS + four];
        put_four(place, normed * weights[each], live, thread);
        if (ALIKE == 1u) {
            put_four(params.m_place + place, m, live, thread);
        } else if (live) {
            put_floats(params.m_place + place, m);
        }
        if (live) {
            put_floats(params.s_place + place, normed * next[2u * FOURS + four]);
        }
    }
}
