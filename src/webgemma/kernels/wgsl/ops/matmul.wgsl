// For each token t and row n: sum over k of W[n, k] x[t, k], handed to finish(t, n, sum). A workgroup
// computes a tile of them: see lib/tile.wgsl.

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
