// fetch, stage, add_slice: a slice of k through workgroup memory as integers, a group of 32 at a time. The
// SPLIT threads of a spot take every SPLIT-th group.
// uses: integer_dot format

struct Params {
    rows: u32, // of this part of W
    units: u32, // of a row
}

override THREADS: u32;
override TILE_ROWS: u32;
override TILE_TOKENS: u32;
override ROWS_EACH: u32;
override TOKENS_EACH: u32;
override SLICE: u32;
override BUFFERS: u32;

var<storage, read> x: array<vec4<u32>>;

const PAIR: u32 = 1u; // neighbouring threads that have the same rows
const GROUPS: u32 = SLICE / 32u;
const UNIT_GROUPS: u32 = UNIT / 32u;
const SLICE_UNITS: u32 = SLICE / UNIT;
const W_ITEMS: u32 = TILE_ROWS * SLICE_UNITS; // units of the tile's weights
const W_EACH: u32 = (W_ITEMS + THREADS - 1u) / THREADS;
const SLICE_QUARTERS: u32 = GROUPS * QUARTERS;
const X_ITEMS: u32 = TILE_TOKENS * SLICE_QUARTERS; // vec4s of its tokens
const X_EACH: u32 = (X_ITEMS + THREADS - 1u) / THREADS;

const_assert SLICE_UNITS * UNIT == SLICE;
const_assert BUFFERS == 1u && SPLIT <= GROUPS;
const_assert SPLIT == 1u || THREADS <= 3u * GROUPS * TILE_ROWS; // a sum of each thread fits

// What a thread fetches of a slice: while it is on its way, the one before is multiplied.
struct Ahead {
    words: array<Words, W_EACH>, // undecoded, so that nothing waits for them
    tokens: array<vec4<u32>, X_EACH>,
}

// Neighbours are an odd number of vec4s apart, so that they use other banks: a row's group is three (its q,
// its sizes), a token's QUARTERS.
var<workgroup> w_tile: array<vec4<u32>, 3u * GROUPS * TILE_ROWS>;
var<workgroup> x_tile: array<vec4<u32>, X_ITEMS>;

// Beyond the last row, token or unit, that one is fetched again; x is 0 there, where it would count.
fn fetch(ahead: ptr<function, Ahead>, tile: Tile, slice: u32, thread: u32) {
    for (var i = 0u; i < W_EACH; i++) {
        let item = thread + i * THREADS;
        if (item < W_ITEMS) {
            let row = min(tile.row + item / SLICE_UNITS, params.rows - 1u);
            let unit = min(slice * SLICE_UNITS + item % SLICE_UNITS, params.units - 1u);
            (*ahead).words[i] = words_of(row, unit);
        }
    }
    let groups = params.units * UNIT_GROUPS; // of a row
    for (var i = 0u; i < X_EACH; i++) {
        let item = thread + i * THREADS;
        let t = x_row(tile, item / SLICE_QUARTERS);
        let group = slice * GROUPS + item % SLICE_QUARTERS / QUARTERS;
        if (group < groups) {
            (*ahead).tokens[i] = x[group_place(t * groups + group, item % QUARTERS)];
        } else {
            (*ahead).tokens[i] = vec4(0u);
        }
    }
}

fn stage(ahead: ptr<function, Ahead>, buffer: u32, tile: Tile, thread: u32) {
    for (var i = 0u; i < W_EACH; i++) {
        let item = thread + i * THREADS;
        if (item < W_ITEMS) {
            var weights = integer_unit((*ahead).words[i]);
            for (var j = 0u; j < UNIT_GROUPS; j++) {
                let group = item % SLICE_UNITS * UNIT_GROUPS + j;
                let at = 3u * (group * TILE_ROWS + item / SLICE_UNITS);
                w_tile[at] = weights[j].first;
                w_tile[at + 1u] = weights[j].last;
                w_tile[at + 2u] = bitcast<vec4<u32>>(weights[j].sizes);
            }
        }
    }
    for (var i = 0u; i < X_EACH; i++) {
        let item = thread + i * THREADS;
        if (item < X_ITEMS) {
            x_tile[item] = (*ahead).tokens[i];
        }
    }
}

fn weights_at(line: u32) -> Weights {
    let at = 3u * line;
    return Weights(w_tile[at], w_tile[at + 1u], bitcast<vec4<f32>>(w_tile[at + 2u]));
}

fn add_slice(sums: ptr<function, Sums>, buffer: u32, row: u32, token: u32, share: u32) {
    for (var group = share; group < GROUPS; group += SPLIT) {
        var w: array<Weights, ROWS_EACH>;
        for (var i = 0u; i < ROWS_EACH; i++) {
            w[i] = weights_at(group * TILE_ROWS + row + i * ACROSS);
        }
        for (var j = 0u; j < TOKENS_EACH; j++) {
            let at = (token + j * DOWN) * SLICE_QUARTERS + group * QUARTERS;
            let low = at + 2u * BYTES - 2u;
            let sizes = bitcast<vec4<f32>>(x_tile[at + QUARTERS - 1u]);
            let a = Sixteen(x_tile[at], x_tile[low], sizes.x, sizes.y);
            let b = Sixteen(x_tile[at + 1u], x_tile[low + 1u], sizes.x, sizes.z);
            for (var i = 0u; i < QUADS; i++) {
                (*sums)[j][i] += vec4(
                    integer_product(w[4u * i], a, b),
                    integer_product(w[4u * i + 1u], a, b),
                    integer_product(w[4u * i + 2u], a, b),
                    integer_product(w[4u * i + 3u], a, b),
                );
            }
        }
    }
}

fn put_sum(sum: vec4<f32>, thread: u32) {
    w_tile[thread] = bitcast<vec4<u32>>(sum);
}

fn get_sum(thread: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(w_tile[thread]);
}
