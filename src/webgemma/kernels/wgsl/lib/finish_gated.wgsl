// A row's sum is a gate: y = gelu(sum) * up, up a slice of longer rows.

@group(0) @binding(5) var<storage, read> up: array<f32>;

fn finish(t: u32, row: u32, sum: f32) {
    let n = params.first_row + row;
    y[t * params.stride + n] = gelu(sum) * up[t * params.up_stride + params.up_first + n];
}
