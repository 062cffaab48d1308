// keep: four values of a row of x in workgroup memory, quantised in the groups that integer_dot reads; `index` counts
// vec4s. All threads of a workgroup call it together, eight neighbours for a group: see store/integer.
// uses: quantised group_place

override WIDTH: u32;
override TOKENS: u32 = 1u; // rows

const KEPT: u32 = (TOKENS * (WIDTH / 32u) + 7u) / 8u * (8u * QUARTERS);

fn kept_place(index: u32) -> u32 {
    return index;
}

fn keep(index: u32, values: vec4<f32>, live: bool, thread: u32) {
    let q = quantised(values, thread);
    let high = four_words(q.high, thread);
    var low = high;
    if (BYTES == 2u) {
        low = four_words(q.low, thread);
    }
    let group = index / 8u;
    let j = index % 8u;
    if (live && j % 4u == 0u) {
        x[group_place(group, j / 4u)] = high;
        if (BYTES == 2u) {
            x[group_place(group, 2u + j / 4u)] = low;
        }
    }
    if (live && j == 0u) {
        x[group_place(group, QUARTERS - 1u)] = bitcast<vec4<u32>>(vec4(q.scale, q.sums, 0.0));
    }
}
