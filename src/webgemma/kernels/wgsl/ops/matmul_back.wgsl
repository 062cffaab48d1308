// dx[t, k] = sum over n of W[n, k] dy[t, n]: the way back through y = W x. A workgroup computes TILE_M
// tokens by TILE_N columns k, SLICE rows of W at a time, see lib/outer.wgsl. The rows may be cut into
// shares, along the grid's z; each share's sums are a [batch, width] of their own.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    first_row: u32, // column of dy for the first row of this part
    begin: u32, // rows of this part that the dispatch adds up
    end: u32,
    units: u32,
    stride: u32, // values of dy for each token
    batch: u32,
    share_rows: u32,
    first_share: u32, // of this part's
    add: u32, // 1: to what dx holds
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> dy: array<f32>;
@group(0) @binding(3) var<storage, read_write> dx: array<vec4<f32>>;

struct Tile {
    begin: u32, // of its rows
    end: u32,
    part: u32, // the first row of this part of W, as rows are counted
    unit: u32, // its first
    token: u32,
}

// Neighbouring threads read neighbouring columns of dy.
fn left_place(item: u32) -> vec2<u32> {
    return vec2(item % SLICE, item / SLICE);
}

fn left_value(tile: Tile, n: u32, m: u32) -> f32 {
    return dy[min(tile.token + m, params.batch - 1u) * params.stride + params.first_row + n];
}

fn left_staged(four: vec4<f32>, m_four: u32) -> vec4<f32> {
    return four;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let begin = params.begin + group.z * params.share_rows;
    let end = min(begin + params.share_rows, params.end);
    let tile = Tile(begin, end, 0u, group.x * TILE_UNITS, group.y * TILE_M);
    var sums: Sums;
    sum_up(&sums, tile, thread);
    let fours = params.units * UNIT_FOURS;
    let first = (params.first_share + group.z) * params.batch;
    for (var i = 0u; i < 4u * EACH_M; i++) {
        let t = tile.token + own_m(thread, i);
        let line = (first + t) * fours;
        for (var j = 0u; j < EACH_N; j++) {
            let four = group.x * N_FOURS + own_four(thread, j);
            if (t < params.batch && four < fours) {
                var before = vec4(0.0);
                if (params.add == 1u) {
                    before = dx[line + four];
                }
                dx[line + four] = before + sums[i][j];
            }
        }
    }
}
