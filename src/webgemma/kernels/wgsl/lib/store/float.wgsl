// store_vec4, store_floats: four values of a row of h, as floats; `index` counts vec4s.

alias Stored = vec4<f32>;

fn store_vec4(index: u32, values: vec4<f32>, live: bool, thread: u32) {
    if (live) {
        store_floats(index, values);
    }
}

fn store_floats(index: u32, values: vec4<f32>) {
    h[index] = values;
}
