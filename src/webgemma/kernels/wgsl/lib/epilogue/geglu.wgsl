// finish: a row's sum is a gate, y = gelu(sum) * up, where up is a slice of longer rows.
// uses: gelu

struct Params {
    first_row: u32, // column of y for the first row
    stride: u32, // values of y for each token
    up_stride: u32,
    up_first: u32,
}

var<storage, read_write> y: array<f32>;
var<storage, read> up: array<f32>;

fn finish(t: u32, row: u32, sum: f32) {
    let n = params.first_row + row;
    y[t * params.stride + n] = gelu(sum) * up[t * params.up_stride + params.up_first + n];
}
