// store_row: a value of h, from the first of the LANES threads that share it.

override LANES: u32;

alias Stored = f32;

fn store_row(index: u32, value: f32, live: bool, thread: u32) {
    if (live && thread % LANES == 0u) {
        h[index] = value;
    }
}
