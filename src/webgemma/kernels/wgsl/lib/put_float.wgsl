// put_four, put_floats: four values of a row of h, as floats; place counts the fours.

alias Stored = vec4<f32>;

fn put_four(place: u32, four: vec4<f32>, live: bool, thread: u32) {
    if (live) {
        put_floats(place, four);
    }
}

fn put_floats(place: u32, four: vec4<f32>) {
    h[place] = four;
}
