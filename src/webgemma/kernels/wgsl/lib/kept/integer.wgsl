// keep: four values of a row of x in workgroup memory, quantised in the groups that integer_dot reads; `index` counts
// vec4s. All threads of a workgroup call it together, eight neighbours for a group: see store/integer.
// uses: quantised

override WIDTH: u32;
override TOKENS: u32 = 1u; // rows

const KEPT_GROUP: u32 = 2u * BYTES + 1u; // vec4s
const KEPT: u32 = TOKENS * (WIDTH / 32u) * KEPT_GROUP;

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
    let at = index / 8u * KEPT_GROUP;
    let j = index % 8u;
    if (live && j % 4u == 0u) {
        x[at + j / 4u] = high;
        if (BYTES == 2u) {
            x[at + 2u + j / 4u] = low;
        }
    }
    if (live && j == 0u) {
        x[at + KEPT_GROUP - 1u] = bitcast<vec4<u32>>(vec4(q.scale, q.sums, 0.0));
    }
}
