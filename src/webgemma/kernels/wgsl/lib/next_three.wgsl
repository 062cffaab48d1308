// put_next: of a normed row, what the branches of a layer with experts read, each normed * a vector of
// next: n for the dense one; m for the experts, ALIKE 1: stored as n is; s for the router. m and s lie
// further on in h, m_place and s_place fours from its beginning.

fn put_next(place: u32, i: u32, normed: vec4<f32>, live: bool, thread: u32) {
    let fours = params.width / 4u;
    let m = normed * next[fours + i];
    put_four(place, normed * next[i], live, thread);
    if (ALIKE == 1u) {
        put_four(params.m_place + place, m, live, thread);
    } else if (live) {
        put_floats(params.m_place + place, m);
    }
    if (live) {
        put_floats(params.s_place + place, normed * next[2u * fours + i]);
    }
}
