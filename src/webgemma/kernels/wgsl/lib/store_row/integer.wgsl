// store_row: a value of h, from the first of the LANES threads that share it, quantised. The THREADS threads of a
// workgroup call it together and make whole groups of 32; all values of a group are live or none is.
// uses: store=integer

override THREADS: u32;
override LANES: u32;

const STORED_ROWS: u32 = THREADS / LANES;

var<workgroup> group_values: array<f32, STORED_ROWS>;
var<workgroup> group_lives: array<u32, STORED_ROWS / 32u>;

fn store_row(index: u32, value: f32, live: bool, thread: u32) {
    let row = thread / LANES;
    workgroupBarrier(); // the values of earlier groups have been read
    if (thread % LANES == 0u) {
        group_values[row] = value;
        if (row % 32u == 0u) {
            group_lives[row / 32u] = u32(live);
        }
    }
    workgroupBarrier();
    let j = thread % (STORED_ROWS / 4u);
    let values = vec4(
        group_values[4u * j],
        group_values[4u * j + 1u],
        group_values[4u * j + 2u],
        group_values[4u * j + 3u],
    );
    let stores = thread < STORED_ROWS / 4u && group_lives[j / 8u] == 1u;
    store_vec4((index - row) / 4u + j, values, stores, thread);
}
