// store_row: a value of h, from the first of the LANES threads that share it, quantised. The
// THREADS = 32 * LANES threads of a workgroup call it together and make one group of 32.
// uses: store=integer

override LANES: u32;

var<workgroup> group_values: array<f32, 32>;

fn store_row(index: u32, value: f32, live: bool, thread: u32) {
    workgroupBarrier(); // the values of an earlier group have been read
    if (thread % LANES == 0u) {
        group_values[thread / LANES] = value;
    }
    workgroupBarrier();
    let j = thread % 8u;
    let values = vec4(
        group_values[4u * j],
        group_values[4u * j + 1u],
        group_values[4u * j + 2u],
        group_values[4u * j + 3u],
    );
    store_vec4(index / 32u * 8u + j, values, live && thread < 8u, thread);
}
