// keep: four values of a row of x in workgroup memory, as floats; `index` counts vec4s. A vec4 is left out after every
// sixteen, so that threads which read units of the same length at once do not wait for the same banks.

override WIDTH: u32;
override TOKENS: u32 = 1u; // rows

const KEPT: u32 = TOKENS * WIDTH / 4u + TOKENS * WIDTH / 64u;

fn kept_place(index: u32) -> u32 {
    return index + index / 16u;
}

fn keep(index: u32, values: vec4<f32>, live: bool, thread: u32) {
    if (live) {
        x[kept_place(index)] = values;
    }
}
