// keep: four values of the row x in workgroup memory, as floats; `index` counts vec4s.

override WIDTH: u32;

const KEPT: u32 = WIDTH / 4u;

fn keep(index: u32, values: vec4<f32>, live: bool, thread: u32) {
    if (live) {
        x[index] = values;
    }
}
