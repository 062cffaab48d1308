// fetch, stage, add_slice: a slice of k through workgroup memory as floats, four k at a time. The
// SPLIT threads of a place take every SPLIT-th four.

@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;

const PAIR: u32 = 1u; // neighbouring threads that have the same rows
const FOURS: u32 = SLICE / 4u;
const UNIT_FOURS: u32 = UNIT / 4u;
const SLICE_UNITS: u32 = max(1u, SLICE / UNIT); // either several units make a slice
const UNIT_SLICES: u32 = max(1u, UNIT / SLICE); // or several slices a unit

const_assert SLICE_UNITS * UNIT == UNIT_SLICES * SLICE;
const_assert BUFFERS == 1u && SPLIT <= FOURS;
const_assert SPLIT == 1u || THREADS <= TILE_ROWS * FOURS; // a sum of each thread fits into w_tile

alias Ahead = u32; // only which slice is next

var<workgroup> w_tile: array<vec4<f32>, TILE_ROWS * FOURS>;
var<workgroup> x_tile: array<vec4<f32>, TILE_TOKENS * FOURS>;

// Where four k of a line of a tile stands: turned by the line, so that neighbours use other banks.
fn place(line: u32, k: u32) -> u32 {
    return line * FOURS + (k + line) % FOURS;
}

fn fetch(ahead: ptr<function, Ahead>, tile: Tile, slice: u32, thread: u32) {
    *ahead = slice;
}

fn stage(ahead: ptr<function, Ahead>, buffer: u32, tile: Tile, thread: u32) {
    load_weights(tile.row, *ahead, thread);
    load_tokens(tile, *ahead, thread);
}

fn load_weights(first: u32, slice: u32, thread: u32) {
    let phase = slice % UNIT_SLICES;
    for (var item = thread; item < TILE_ROWS * SLICE_UNITS; item += THREADS) {
        let line = item / SLICE_UNITS;
        let unit = slice / UNIT_SLICES * SLICE_UNITS + item % SLICE_UNITS;
        var weights = array<vec4<f32>, UNIT_FOURS>(); // naga zeroes a bare `var` only once
        if (first + line < params.rows && unit < params.units) {
            weights = decode(first + line, unit);
        }
        for (var i = 0u; i < UNIT_FOURS; i++) {
            if (i / FOURS == phase) { // a run-time index would take the weights out of registers
                w_tile[place(line, item % SLICE_UNITS * UNIT_FOURS + i % FOURS)] = weights[i];
            }
        }
    }
}

fn load_tokens(tile: Tile, slice: u32, thread: u32) {
    let width = params.units * UNIT_FOURS;
    for (var item = thread; item < TILE_TOKENS * FOURS; item += THREADS) {
        let line = item / FOURS;
        let k = slice * FOURS + item % FOURS;
        var four = vec4(0.0);
        if (tile.token + line < tile.count && k < width) {
            four = x[x_row(tile, line) * width + k];
        }
        x_tile[place(line, item % FOURS)] = four;
    }
}

fn add_slice(sums: ptr<function, Sums>, buffer: u32, row: u32, token: u32, share: u32) {
    for (var k = share; k < FOURS; k += SPLIT) {
        var w: array<mat4x4<f32>, QUADS>; // a column is four rows at one k
        for (var i = 0u; i < QUADS; i++) {
            let line = row + 4u * i * ACROSS;
            w[i] = transpose(mat4x4<f32>(
                w_tile[place(line, k)],
                w_tile[place(line + ACROSS, k)],
                w_tile[place(line + 2u * ACROSS, k)],
                w_tile[place(line + 3u * ACROSS, k)],
            ));
        }
        for (var j = 0u; j < TOKENS_EACH; j++) {
            let four = x_tile[place(token + j * DOWN, k)];
            for (var i = 0u; i < QUADS; i++) {
                var sum = (*sums)[j][i];
                sum = fma(w[i][0], vec4(four.x), sum);
                sum = fma(w[i][1], vec4(four.y), sum);
                sum = fma(w[i][2], vec4(four.z), sum);
                (*sums)[j][i] = fma(w[i][3], vec4(four.w), sum);
            }
        }
    }
}

fn put_sum(sum: vec4<f32>, thread: u32) {
    w_tile[thread] = sum;
}

fn get_sum(thread: u32) -> vec4<f32> {
    return w_tile[thread];
}
