// What matvec, matmul and matmul_lanes have in common: a product of x with the rows of a part of W.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    first_row: u32, // of y: where this part's rows begin
    rows: u32,
    units: u32,
    stride: u32, // values of y for each token
    up_stride: u32,
    up_first: u32,
    batch: u32, // tokens of x
    rank_fours: u32, // and for adapters: see finish_adapted.wgsl
    matrix_row: u32,
    second: u32,
    third: u32,
    segments: u32,
    low: f32, // bounds of y: see finish_held.wgsl
    high: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> state: State;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
