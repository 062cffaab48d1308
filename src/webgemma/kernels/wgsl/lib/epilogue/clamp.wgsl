// finish: a row's sum goes into y clamped to bounds.
// uses: clamped

struct Params {
    first_row: u32, // column of y for the first row
    stride: u32, // values of y for each token
    low: f32,
    high: f32,
}

var<storage, read_write> y: array<f32>;

fn finish(t: u32, row: u32, sum: f32) {
    y[t * params.stride + params.first_row + row] = clamped(sum, params.low, params.high);
}
