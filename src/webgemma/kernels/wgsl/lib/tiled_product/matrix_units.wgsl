// multiply: for the rows n and tokens t of a tile, the sum over k of W[n, k] x[t, k], handed to
// store(tile, t, n, sum), as in tiled_product/slices, but computed by the GPU's matrix units. x is float16,
// see round_f16; W is decoded and rounded to float16. A workgroup computes TILE_ROWS rows by TILE_TOKENS
// tokens, SLICE of k at a time through workgroup memory; of that, a subgroup computes SUB_ROWS by SUB_TOKENS
// in matrices of MATRIX_M tokens by MATRIX_N rows, MATRIX_K of k at a time. While a slice is multiplied, the
// next two are on their way. The op says which rows of x a tile reads (x_row) and what becomes of sums (store).
// uses: format

struct Params {
    rows: u32, // of this part of W
    units: u32, // of a row
    x_rows: u32, // of x
}

override THREADS: u32;
override SUBGROUP: u32; // threads of a subgroup
override TILE_ROWS: u32;
override TILE_TOKENS: u32;
override SUB_ROWS: u32;
override SUB_TOKENS: u32;
override SLICE: u32;
override BUFFERS: u32;
override MATRIX_M: u32;
override MATRIX_N: u32;
override MATRIX_K: u32;

var<storage, read> x: array<vec4<u32>>; // eight float16 each; after the rows of x, a scale for each

const DOWN: u32 = TILE_TOKENS / SUB_TOKENS; // subgroups along the tokens
const ACROSS: u32 = TILE_ROWS / SUB_ROWS; // subgroups along the rows
const HIGH: u32 = SUB_TOKENS / MATRIX_M; // matrices of a subgroup, along the tokens
const WIDE: u32 = SUB_ROWS / MATRIX_N; // and along the rows
const UNIT_VEC4S: u32 = UNIT / 4u;
const SLICE_UNITS: u32 = SLICE / UNIT;
const SLICE_VEC8S: u32 = SLICE / 8u;
const LINE: u32 = SLICE + 8u; // longer than a slice, so that neighbouring lines use other banks
const W_ITEMS: u32 = TILE_ROWS * SLICE_UNITS; // units of a slice of W
const W_EACH: u32 = (W_ITEMS + THREADS - 1u) / THREADS;
const X_ITEMS: u32 = TILE_TOKENS * SLICE_VEC8S; // vec4s of a slice of x
const X_EACH: u32 = (X_ITEMS + THREADS - 1u) / THREADS;
const MATRIX: u32 = MATRIX_M * MATRIX_N;

const_assert THREADS == SUBGROUP * DOWN * ACROSS;
const_assert HIGH * MATRIX_M == SUB_TOKENS && WIDE * MATRIX_N == SUB_ROWS;
const_assert SLICE_UNITS * UNIT == SLICE && SLICE % MATRIX_K == 0u;
const_assert HIGH <= 4u && WIDE <= 4u;

alias Left = subgroup_matrix_left<f16, MATRIX_K, MATRIX_M>;
alias Right = subgroup_matrix_right<f16, MATRIX_N, MATRIX_K>;
alias Result = subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>;
alias Sums = array<array<Result, WIDE>, HIGH>; // of a subgroup

struct Tile {
    row: u32, // its first, in this part of W; where that is before the part's first, it wraps
    end: u32, // where its rows end
    column: u32, // of y, for its first row
    token: u32, // its first
    count: u32, // where the tokens end
    split: u32, // of k, which several workgroups may share
    slice: u32, // its first
    slices: u32, // where they end
}

// What a thread fetches of a slice: undecoded, so that nothing waits for it.
struct Ahead {
    words: array<Words, W_EACH>,
    tokens: array<vec4<u32>, X_EACH>,
}

var<workgroup> w_tile: array<f16, BUFFERS * TILE_ROWS * LINE>;
var<workgroup> x_tile: array<f16, BUFFERS * TILE_TOKENS * LINE>;
var<workgroup> scales: array<f32, TILE_TOKENS>; // of the rows of x
var<workgroup> results: array<f32, THREADS / SUBGROUP * MATRIX>; // a matrix of each subgroup

// Beyond the last row or unit, that one is fetched again; x is 0 there, where it would count.
fn fetch(ahead: ptr<function, Ahead>, tile: Tile, slice: u32, thread: u32) {
    for (var i = 0u; i < W_EACH; i++) {
        let item = thread + i * THREADS;
        if (W_ITEMS % THREADS == 0u || item < W_ITEMS) {
            let row = min(tile.row + item / SLICE_UNITS, params.rows - 1u);
            let unit = min(slice * SLICE_UNITS + item % SLICE_UNITS, params.units - 1u);
            (*ahead).words[i] = words_of(row, unit);
        }
    }
    let length = params.units * UNIT / 8u;
    for (var i = 0u; i < X_EACH; i++) {
        let item = thread + i * THREADS;
        let at = slice * SLICE_VEC8S + item % SLICE_VEC8S;
        var values = vec4(0u);
        if (at < length) {
            values = x[x_row(tile, min(item / SLICE_VEC8S, TILE_TOKENS - 1u)) * length + at];
        }
        (*ahead).tokens[i] = values;
    }
}

fn stage(ahead: ptr<function, Ahead>, buffer: u32, thread: u32) {
    for (var i = 0u; i < W_EACH; i++) {
        let item = thread + i * THREADS;
        if (W_ITEMS % THREADS == 0u || item < W_ITEMS) {
            let weights = weights_of((*ahead).words[i]);
            let to = (buffer * TILE_ROWS + item / SLICE_UNITS) * LINE + item % SLICE_UNITS * UNIT;
            for (var j = 0u; j < UNIT_VEC4S; j++) {
                let values = vec4<f16>(weights[j]);
                w_tile[to + 4u * j] = values.x;
                w_tile[to + 4u * j + 1u] = values.y;
                w_tile[to + 4u * j + 2u] = values.z;
                w_tile[to + 4u * j + 3u] = values.w;
            }
        }
    }
    for (var i = 0u; i < X_EACH; i++) {
        let item = thread + i * THREADS;
        if (X_ITEMS % THREADS == 0u || item < X_ITEMS) {
            let to = (buffer * TILE_TOKENS + item / SLICE_VEC8S) * LINE + item % SLICE_VEC8S * 8u;
            for (var j = 0u; j < 4u; j++) {
                let values = bitcast<vec2<f16>>((*ahead).tokens[i][j]);
                x_tile[to + 2u * j] = values.x;
                x_tile[to + 2u * j + 1u] = values.y;
            }
        }
    }
}

// By which the values of a row of x were divided.
fn scale_of(row: u32) -> f32 {
    let word = params.x_rows * (params.units * UNIT / 2u) + row;
    return bitcast<f32>(x[word / 4u][word % 4u]);
}

// A subgroup's first token in the tile, and its first row.
fn subgroup_line(thread: u32) -> u32 {
    return thread / SUBGROUP % DOWN * SUB_TOKENS;
}

fn subgroup_row(thread: u32) -> u32 {
    return thread / SUBGROUP / DOWN * SUB_ROWS;
}

// A matrix of every subgroup, so many tokens and rows from its first, goes through workgroup memory.
fn store_matrix(sums: Result, tile: Tile, token: u32, row: u32, thread: u32) {
    let mine = thread / SUBGROUP * MATRIX;
    workgroupBarrier();
    subgroupMatrixStore(&results, mine, sums, false, MATRIX_N);
    workgroupBarrier();
    for (var i = thread % SUBGROUP; i < MATRIX; i += SUBGROUP) {
        let line = subgroup_line(thread) + token + i / MATRIX_N;
        let n = tile.row + subgroup_row(thread) + row + i % MATRIX_N;
        if (tile.token + line < tile.count && n < tile.end) {
            store(tile, tile.token + line, n, results[mine + i] * scales[line]);
        }
    }
}

// Written out: a loop with barriers does not unroll, and its index would move the sums out of registers.
fn store_line(sums: array<Result, WIDE>, tile: Tile, token: u32, thread: u32) {
    store_matrix(sums[0], tile, token, 0u, thread);
    if (WIDE > 1u) {
        store_matrix(sums[min(1u, WIDE - 1u)], tile, token, MATRIX_N, thread);
    }
    if (WIDE > 2u) {
        store_matrix(sums[min(2u, WIDE - 1u)], tile, token, 2u * MATRIX_N, thread);
    }
    if (WIDE > 3u) {
        store_matrix(sums[min(3u, WIDE - 1u)], tile, token, 3u * MATRIX_N, thread);
    }
}

fn all_slices() -> u32 {
    return (params.units * UNIT + SLICE - 1u) / SLICE;
}

// Stage a slice that was fetched, fetch the one after the next, and add the slice's products.
fn add_slice(sums: ptr<function, Sums>, ahead: ptr<function, Ahead>, tile: Tile, slice: u32, thread: u32) {
    let buffer = slice % BUFFERS;
    if (BUFFERS == 1u) { // with two, what is staged over has been read
        workgroupBarrier();
    }
    stage(ahead, buffer, thread);
    fetch(ahead, tile, slice + 2u, thread); // before the barrier, else compilers move it behind the products
    workgroupBarrier();
    let line = buffer * TILE_TOKENS + subgroup_line(thread);
    let row = buffer * TILE_ROWS + subgroup_row(thread);
    for (var k = 0u; k < SLICE; k += MATRIX_K) {
        var right: array<Right, WIDE>;
        for (var j = 0u; j < WIDE; j++) {
            right[j] = subgroupMatrixLoad<Right>(&w_tile, (row + j * MATRIX_N) * LINE + k, true, LINE);
        }
        for (var i = 0u; i < HIGH; i++) {
            let left = subgroupMatrixLoad<Left>(&x_tile, (line + i * MATRIX_M) * LINE + k, false, LINE);
            for (var j = 0u; j < WIDE; j++) {
                (*sums)[i][j] = subgroupMatrixMultiplyAccumulate(left, right[j], (*sums)[i][j]);
            }
        }
    }
}

fn multiply(tile: Tile, thread: u32) {
    var sums: Sums;
    var even: Ahead; // not one that becomes the other: that would wait for it
    var odd: Ahead;
    fetch(&even, tile, tile.slice, thread);
    fetch(&odd, tile, tile.slice + 1u, thread);
    for (var i = thread; i < TILE_TOKENS; i += THREADS) {
        scales[i] = scale_of(x_row(tile, i));
    }
    for (var slice = tile.slice; slice < tile.slices; slice += 2u) {
        add_slice(&sums, &even, tile, slice, thread);
        if (slice + 1u < tile.slices) {
            add_slice(&sums, &odd, tile, slice + 1u, thread);
        }
    }
    store_line(sums[0], tile, 0u, thread);
    if (HIGH > 1u) {
        store_line(sums[min(1u, HIGH - 1u)], tile, MATRIX_M, thread);
    }
    if (HIGH > 2u) {
        store_line(sums[min(2u, HIGH - 1u)], tile, 2u * MATRIX_M, thread);
    }
    if (HIGH > 3u) {
        store_line(sums[min(3u, HIGH - 1u)], tile, 3u * MATRIX_M, thread);
    }
}
