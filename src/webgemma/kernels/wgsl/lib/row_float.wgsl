// put_rows: `count` of PAIRS neighbouring values of h, from the first of the LANES threads that share
// them.

alias Stored = f32;

fn put_rows(place: u32, values: array<f32, PAIRS>, count: u32, thread: u32) {
    for (var i = 0u; i < PAIRS; i++) {
        if (i < count && thread % LANES == 0u) {
            h[place + i] = values[i];
        }
    }
}
