// y[s, column + n] = sum over k of W[e, n, k] x[s / fan, k] for the slots s that are routed to expert e and its rows n.
// A workgroup for each tile of expert_sort and each TILE_ROWS rows, see tiled_product; the tile's tokens are
// entries of `slots`. Rows outside this part of W are left alone.
// uses: tiled_product format

struct Params {
    first_row: u32, // of this part, among the rows of all experts
    rows: u32, // in this part
    expert_rows: u32,
    stride: u32, // values of y for each slot
    column: u32, // of y, for an expert's first row
    fan: u32, // slots that share a row of x
}

override THREADS: u32;
override TILE_ROWS: u32;
override TILE_TOKENS: u32;

var<storage, read> tiles: array<vec4<u32>>;
var<storage, read_write> y: array<f32>;
var<storage, read> slots: array<u32>;

var<workgroup> x_rows: array<u32, TILE_TOKENS>; // that the tile's slots read

fn x_row(tile: Tile, line: u32) -> u32 {
    return x_rows[min(line, TILE_TOKENS - 1u)];
}

fn store(tile: Tile, t: u32, n: u32, sum: f32) {
    y[slots[t] * params.stride + tile.column + n - tile.row] = sum;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let sorted = tiles[group.y]; // expert, begin, end
    let first = sorted.x * params.expert_rows - params.first_row; // wraps before this part
    let end = min(bitcast<i32>(first + params.expert_rows), i32(params.rows));
    let row = first + group.x * TILE_ROWS;
    let here = end > 0 && bitcast<i32>(row) < end && bitcast<i32>(row + TILE_ROWS) > 0;
    if (!here || sorted.y == sorted.z) {
        return;
    }
    for (var line = thread; line < TILE_TOKENS; line += THREADS) {
        x_rows[line] = slots[min(sorted.y + line, sorted.z - 1u)] / params.fan;
    }
    workgroupBarrier();
    let column = params.column + group.x * TILE_ROWS;
    multiply(Tile(row, u32(end), column, sorted.y, sorted.z, 0u, 0u, all_slices()), thread);
}
