// For each token t and row n: the sum over k of W[n, k] x[t, k], handed to finish(t, n, sum). A workgroup computes a
// tile of them, see tiled_product. k may be split among the layers of the grid, split_slices of it each: the sums of
// a layer come `tokens` tokens after those of the one before.
// uses: batch=tokens tiled_product epilogue format

struct Params {
    first_row: u32, // column of y for the first row
    rows: u32, // in this part of W
    tokens: u32, // of x
    split_slices: u32,
}

override THREADS: u32;
override TILE_ROWS: u32;
override TILE_TOKENS: u32;

// Beyond the last token, that one is read again.
fn x_row(tile: Tile, line: u32) -> u32 {
    return min(tile.token + line, tile.count - 1u);
}

fn store(tile: Tile, t: u32, n: u32, sum: f32) {
    finish(tile.split * params.tokens + t, n, sum);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.x * TILE_ROWS;
    let token = group.y * TILE_TOKENS;
    let count = min(batch.count, params.tokens);
    if (row >= params.rows || token >= count) {
        return;
    }
    let column = params.first_row + row;
    let slice = group.z * params.split_slices;
    let slices = min(slice + params.split_slices, all_slices());
    multiply(Tile(row, params.rows, column, token, count, group.z, slice, slices), thread);
}
