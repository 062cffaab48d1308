// finish: a row's sum plus what LoRA adapters add, y = sum + Σ_j B[row, j] low[t, j]. Up to three matrices may
// be stacked; the rows of each have their own segment of low ranks. An adapter that t does not apply is not read.

struct Params {
    first_row: u32, // column of y for the first row
    stride: u32, // values of y for each token
    rank_vec4s: u32,
    matrix_row: u32, // row of the whole stack for the first row
    second: u32, // rows of the stack where the second and third matrix begin
    third: u32,
    segments: u32,
}

var<storage, read_write> y: array<f32>;
var<storage, read> B: array<vec4<f32>>;
var<storage, read> low: array<vec4<f32>>;

fn finish(t: u32, row: u32, sum: f32) {
    let n = params.matrix_row + row;
    let segment = u32(n >= params.second) + u32(n >= params.third);
    let from_row = n * params.rank_vec4s;
    let from_low = (t * params.segments + segment) * params.rank_vec4s;
    var total = sum;
    for (var j = 0u; j < params.rank_vec4s; j++) {
        let part = low[from_low + j];
        if (any(part != vec4<f32>())) {
            total += dot(B[from_row + j], part);
        }
    }
    y[t * params.stride + params.first_row + row] = total;
}
