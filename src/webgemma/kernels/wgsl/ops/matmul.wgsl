// For each token t and row n: sum over k of W[n, k] x[t, k], handed to finish(t, n, sum). A workgroup
// computes a tile of them: see lib/tile.wgsl.

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
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> state: State;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

// Beyond the last token comes that one again.
fn x_row(tile: Tile, line: u32) -> u32 {
    return min(tile.token + line, tile.count - 1u);
}

fn store(tile: Tile, t: u32, n: u32, sum: f32) {
    finish(t, n, sum);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = (group.z * groups.x + group.x) * TILE_ROWS;
    let token = group.y * TILE_TOKENS;
    let count = min(state.count, params.batch);
    if (row >= params.rows || token >= count) {
        return;
    }
    multiply(Tile(row, params.rows, params.first_row + row, token, count), thread);
}
