// put_next: of a normed row, h = normed * next.

fn put_next(place: u32, i: u32, normed: vec4<f32>, live: bool, thread: u32) {
    put_four(place, normed * next[i], live, thread);
}
