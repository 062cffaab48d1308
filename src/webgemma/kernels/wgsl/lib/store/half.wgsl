// store_vec4: four values of a row of h in float16, for values that need no scale: that of each row, after the last row,
// is 1. `index` counts vec4s.

struct Params {
    h_rows: u32,
    h_vec4s: u32, // of a row
}

alias Stored = u32;

fn store_vec4(index: u32, values: vec4<f32>, live: bool, thread: u32) {
    if (!live) {
        return;
    }
    h[2u * index] = pack2x16float(values.xy);
    h[2u * index + 1u] = pack2x16float(values.zw);
    if (index % params.h_vec4s == 0u) {
        h[2u * params.h_rows * params.h_vec4s + index / params.h_vec4s] = bitcast<u32>(1.0);
    }
}
