// dx[t, k] = sum over n of W[n, k] dy[t, n]: the backward pass of y = W x on the GPU's matrix units. dy is float16, see
// round_f16. A workgroup computes TILE_TOKENS tokens by TILE_ROWS columns k, SLICE rows of W at a time, see
// tiled_product. The rows may be split along the grid's z; the sums of each split are a [tokens, width] of their own.
// uses: tiled_product=matrix_units format

struct Params {
    tokens: u32,
    split_slices: u32, // of the rows
    first_split: u32, // of this part's
    add: u32, // 1: to what dx holds
}

override THREADS: u32;
override TILE_ROWS: u32;
override TILE_TOKENS: u32;

var<storage, read_write> dx: array<f32>;

// Beyond the last token, that one is read again.
fn x_row(tile: Tile, line: u32) -> u32 {
    return min(tile.token + line, tile.count - 1u);
}

fn store(tile: Tile, t: u32, k: u32, sum: f32) {
    let at = (tile.split * params.tokens + t) * params.units * UNIT + k;
    var before = 0.0;
    if (params.add == 1u) {
        before = dx[at];
    }
    dx[at] = before + sum;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let column = group.x * TILE_ROWS;
    let token = group.y * TILE_TOKENS;
    let split = params.first_split + group.z;
    let slice = group.z * params.split_slices;
    let slices = min(slice + params.split_slices, all_slices());
    multiply(Tile(column, params.units * UNIT, column, token, params.tokens, split, slice, slices), thread);
}
