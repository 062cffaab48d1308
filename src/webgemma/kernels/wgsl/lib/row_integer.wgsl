// put_rows: PAIRS neighbouring values of h, from the first of the LANES threads that share them, as
// integers. All threads of a workgroup call it together and make one group of 32; a count of 0 leaves
// it alone.

var<workgroup> group_values: array<f32, 32>;

const_assert THREADS / LANES * PAIRS == 32u;

fn put_rows(place: u32, values: array<f32, PAIRS>, count: u32, thread: u32) {
    if (thread % LANES == 0u) {
        for (var i = 0u; i < PAIRS; i++) {
            group_values[thread / LANES * PAIRS + i] = values[i];
        }
    }
    workgroupBarrier();
    let j = thread % 8u;
    let four = vec4(
        group_values[4u * j],
        group_values[4u * j + 1u],
        group_values[4u * j + 2u],
        group_values[4u * j + 3u],
    );
    put_four(place / 32u * 8u + j, four, count > 0u && thread < 8u, thread);
}
