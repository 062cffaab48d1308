// put_row: a value of h, from the first of the LANES threads that share it.

alias Stored = f32;

fn put_row(place: u32, value: f32, live: bool, thread: u32) {
    if (live && thread % LANES == 0u) {
        h[place] = value;
    }
}
