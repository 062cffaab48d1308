// A row's sum goes into y held between two bounds.

fn finish(t: u32, row: u32, sum: f32) {
    y[t * params.stride + params.first_row + row] = clamp(sum, params.low, params.high);
}
