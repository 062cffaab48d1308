// fetch, stage, add_slice: a slice of k through workgroup memory as floats, four k at a time. The SPLIT
// threads of a spot take every SPLIT-th vec4.
// uses: format

struct Params {
    rows: u32, // of this part of W
    units: u32, // of a row
}

override THREADS: u32;
override TILE_ROWS: u32;
override TILE_TOKENS: u32;
override TOKENS_EACH: u32;
override SLICE: u32;
override BUFFERS: u32;

var<storage, read> x: array<vec4<f32>>;

const PAIR: u32 = 1u; // neighbouring threads that have the same rows
const SLICE_VEC4S: u32 = SLICE / 4u;
const UNIT_VEC4S: u32 = UNIT / 4u;
const SLICE_UNITS: u32 = max(1u, SLICE / UNIT); // either several units make a slice
const UNIT_SLICES: u32 = max(1u, UNIT / SLICE); // or several slices a unit

const_assert SLICE_UNITS * UNIT == UNIT_SLICES * SLICE;
const_assert BUFFERS == 1u && SPLIT <= SLICE_VEC4S;
const_assert SPLIT == 1u || THREADS <= TILE_ROWS * SLICE_VEC4S; // a sum of each thread fits into w_tile

alias Ahead = u32; // only which slice is next

var<workgroup> w_tile: array<vec4<f32>, TILE_ROWS * SLICE_VEC4S>;
var<workgroup> x_tile: array<vec4<f32>, TILE_TOKENS * SLICE_VEC4S>;

// The index of four k of a line of a tile: rotated by the line, so that neighbours use other banks.
fn tile_index(line: u32, k: u32) -> u32 {
    return line * SLICE_VEC4S + (k + line) % SLICE_VEC4S;
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
        var weights = array<vec4<f32>, UNIT_VEC4S>(); // naga zeroes a bare `var` only once
        if (first + line < params.rows && unit < params.units) {
            weights = decode(first + line, unit);
        }
        for (var i = 0u; i < UNIT_VEC4S; i++) {
            if (i / SLICE_VEC4S == phase) { // a run-time index would move the weights out of registers
                w_tile[tile_index(line, item % SLICE_UNITS * UNIT_VEC4S + i % SLICE_VEC4S)] = weights[i];
            }
        }
    }
}

fn load_tokens(tile: Tile, slice: u32, thread: u32) {
    let width = params.units * UNIT_VEC4S;
    for (var item = thread; item < TILE_TOKENS * SLICE_VEC4S; item += THREADS) {
        let line = item / SLICE_VEC4S;
        let k = slice * SLICE_VEC4S + item % SLICE_VEC4S;
        var values = vec4(0.0);
        if (tile.token + line < tile.count && k < width) {
            values = x[x_row(tile, line) * width + k];
        }
        x_tile[tile_index(line, item % SLICE_VEC4S)] = values;
    }
}

fn add_slice(sums: ptr<function, Sums>, buffer: u32, row: u32, token: u32, share: u32) {
    for (var k = share; k < SLICE_VEC4S; k += SPLIT) {
        var w: array<mat4x4<f32>, QUADS>; // a column is four rows at one k
        for (var i = 0u; i < QUADS; i++) {
            let line = row + 4u * i * ACROSS;
            w[i] = transpose(mat4x4<f32>(
                w_tile[tile_index(line, k)],
                w_tile[tile_index(line + ACROSS, k)],
                w_tile[tile_index(line + 2u * ACROSS, k)],
                w_tile[tile_index(line + 3u * ACROSS, k)],
            ));
        }
        for (var j = 0u; j < TOKENS_EACH; j++) {
            let values = x_tile[tile_index(token + j * DOWN, k)];
            for (var i = 0u; i < QUADS; i++) {
                var sum = (*sums)[j][i];
                sum = fma(w[i][0], vec4(values.x), sum);
                sum = fma(w[i][1], vec4(values.y), sum);
                sum = fma(w[i][2], vec4(values.z), sum);
                (*sums)[j][i] = fma(w[i][3], vec4(values.w), sum);
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
