// A row's sum and what adapters add: y = sum + Σ_j B[row, j] low[t, j], where the rows of each of up
// to three matrices that stand on top of each other have low ranks of their own.

@group(0) @binding(5) var<storage, read> B: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> low: array<vec4<f32>>;

fn finish(t: u32, row: u32, sum: f32) {
    let n = params.matrix_row + row;
    let segment = u32(n >= params.second) + u32(n >= params.third);
    let from_row = n * params.rank_fours;
    let from_low = (t * params.segments + segment) * params.rank_fours;
    var whole = sum;
    for (var j = 0u; j < params.rank_fours; j++) {
        whole += dot(B[from_row + j], low[from_low + j]);
    }
    y[t * params.stride + params.first_row + row] = whole;
}
