// dx[t, k] = sum over n of W[n, k] dy[t, n]: the backward pass of y = W x. A workgroup computes TILE_M tokens by
// TILE_N columns k, SLICE rows of W at a time, see outer_product. The rows may be split along the grid's z; the
// sums of each split are a [tokens, width] of their own.
// uses: outer_product right_operand format

struct Params {
    first_row: u32, // column of dy for the first row of this part
    begin: u32, // rows of this part that the dispatch adds up
    end: u32,
    units: u32,
    stride: u32, // values of dy for each token
    tokens: u32,
    split_rows: u32,
    first_split: u32, // of this part's
    add: u32, // 1: to what dx holds
}

override THREADS: u32;
override TILE_M: u32;
override EACH_M: u32;
override EACH_N: u32;
override SLICE: u32;

var<storage, read> dy: array<f32>;
var<storage, read_write> dx: array<vec4<f32>>;

struct Tile {
    begin: u32, // of its rows
    end: u32,
    part: u32, // the first row of this part of W, as rows are counted
    unit: u32, // its first
    token: u32,
}

// Neighbouring threads read neighbouring columns of dy.
fn left_index(item: u32) -> vec2<u32> {
    return vec2(item % SLICE, item / SLICE);
}

fn left_value(tile: Tile, n: u32, m: u32) -> f32 {
    return dy[min(tile.token + m, params.tokens - 1u) * params.stride + params.first_row + n];
}

fn left_staged(values: vec4<f32>, m: u32) -> vec4<f32> {
    return values;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let begin = params.begin + group.z * params.split_rows;
    let end = min(begin + params.split_rows, params.end);
    let tile = Tile(begin, end, 0u, group.x * TILE_UNITS, group.y * TILE_M);
    var sums: Sums;
    add_up(&sums, tile, thread);
    let vec4s = params.units * UNIT_VEC4S;
    let first = (params.first_split + group.z) * params.tokens;
    for (var i = 0u; i < 4u * EACH_M; i++) {
        let t = tile.token + sum_m(thread, i);
        let line = (first + t) * vec4s;
        for (var j = 0u; j < EACH_N; j++) {
            let column = group.x * N_VEC4S + sum_n(thread, j);
            if (t < params.tokens && column < vec4s) {
                var before = vec4(0.0);
                if (params.add == 1u) {
                    before = dx[line + column];
                }
                dx[line + column] = before + sums[i][j];
            }
        }
    }
}
