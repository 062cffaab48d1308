// multiply: for the rows n and tokens t of a tile, the sum over k of W[n, k] x[t, k], handed to
// store(tile, t, n, sum), as in tiled_product/slices, but computed by the GPU's matrix units. x is float16,
// see round_f16; W is decoded and rounded to float16. A workgroup computes TILE_ROWS rows by TILE_TOKENS
// tokens, SLICE of k at a time through workgroup memory; of that, a subgroup computes SUB_ROWS by SUB_TOKENS
// in matrices of MATRIX_M tokens by MATRIX_N rows, MATRIX_K of k at a time. While a slice is multiplied, the
// next two are on their way. SHARES subgroups may have the same rows and tokens, and a share of the k of a slice
// each: where tokens are few, more threads wait for memory then. The op says which rows of x a tile reads (x_row)
// and what becomes of sums (store).
// With SPLIT_X and SPLIT_W, x and W are sums of a high and a low float16, 22 bits together; a slice takes a
// phase more for each: W high by x low, W high by x high, W low by x high.
// With OVER_ROWS, n are columns of W and sums are over its rows k: of W[k, n].
// uses: format

struct Params {
    rows: u32, // of this part of W
    units: u32, // of a row
    x_rows: u32, // of x
    x_width: u32, // of a row of x
    x_first: u32, // column of x for the first k, a multiple of eight
}

override THREADS: u32;
override SUBGROUP: u32; // threads of a subgroup
override TILE_ROWS: u32;
override TILE_TOKENS: u32;
override SUB_ROWS: u32;
override SUB_TOKENS: u32;
override SLICE: u32;
override SHARES: u32; // of k
override BUFFERS: u32;
override MATRIX_M: u32;
override MATRIX_N: u32;
override MATRIX_K: u32;
override SPLIT_X: bool;
override SPLIT_W: bool;
override OVER_ROWS: bool;

// Eight float16 each. Of a row the high ones, with SPLIT_X then the low ones; after the last row, a scale for each.
var<storage, read> x: array<vec4<u32>>;

const DOWN: u32 = TILE_TOKENS / SUB_TOKENS; // subgroups along the tokens
const ACROSS: u32 = TILE_ROWS / SUB_ROWS; // subgroups along the rows
const HIGH: u32 = SUB_TOKENS / MATRIX_M; // matrices of a subgroup, along the tokens
const WIDE: u32 = SUB_ROWS / MATRIX_N; // and along the rows
const SHARE_K: u32 = SLICE / SHARES; // of a subgroup
const UNIT_VEC4S: u32 = UNIT / 4u;
const SLICE_VEC8S: u32 = SLICE / 8u;
const W_LENGTH: u32 = select(SLICE, TILE_ROWS, OVER_ROWS); // weights of a row of W in a slice
const W_LINES: u32 = select(TILE_ROWS, SLICE, OVER_ROWS); // such rows
// Lines in workgroup memory are longer than needed, so that neighbouring lines use other banks.
const X_LINE: u32 = SLICE + 8u;
const X_SIZE: u32 = X_LINE * TILE_TOKENS;
const W_LINE: u32 = W_LENGTH + 8u;
const W_SIZE: u32 = W_LINE * W_LINES;
const W_UNITS: u32 = W_LENGTH / UNIT; // units of a line
const W_ITEMS: u32 = W_LINES * W_UNITS; // units of a slice of W
const W_EACH: u32 = (W_ITEMS + THREADS - 1u) / THREADS;
const X_ITEMS: u32 = TILE_TOKENS * SLICE_VEC8S; // vec4s of a slice of x
const X_EACH: u32 = (X_ITEMS + THREADS - 1u) / THREADS;
const LOW_EACH: u32 = select(1u, X_EACH, SPLIT_X);
const LOW_W_EACH: u32 = select(1u, W_EACH, SPLIT_W);
const LOW_VEC4S: u32 = select(1u, UNIT_VEC4S, SPLIT_W);
const X_PARTS: u32 = select(1u, 2u, SPLIT_X);
const PHASES: u32 = X_PARTS + select(0u, 1u, SPLIT_W); // of a slice
const SLICES_AHEAD: u32 = select(1u, 2u, PHASES == 1u); // phases give one that is on its way more time
const MATRIX: u32 = MATRIX_M * MATRIX_N;
const W_SCALE: f32 = select(1.0, 256.0, SPLIT_W); // GPUs may take the least float16 for 0: low ones are far below W

const_assert THREADS == SUBGROUP * DOWN * ACROSS * SHARES;
const_assert HIGH * MATRIX_M == SUB_TOKENS && WIDE * MATRIX_N == SUB_ROWS;
const_assert W_UNITS * UNIT == W_LENGTH && SHARE_K * SHARES == SLICE && SHARE_K % MATRIX_K == 0u;
const_assert HIGH <= 4u && WIDE <= 4u;
const_assert PHASES == 1u || BUFFERS == 1u;

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
    low: array<vec4<u32>, LOW_EACH>, // of x
    low_weights: array<array<vec4<f16>, LOW_VEC4S>, LOW_W_EACH>, // decoded with the high ones
}

var<workgroup> w_tile: array<f16, BUFFERS * W_SIZE>;
var<workgroup> x_tile: array<f16, BUFFERS * X_SIZE>;
var<workgroup> scales: array<f32, TILE_TOKENS>; // of the rows of x
var<workgroup> results: array<f32, THREADS / SUBGROUP * MATRIX>; // a matrix of each subgroup

// Where a value is in workgroup memory: of a token at k, of a row at a weight.
fn x_place(buffer: u32, token: u32, k: u32) -> u32 {
    return buffer * X_SIZE + token * X_LINE + k;
}

fn w_place(buffer: u32, row: u32, weight: u32) -> u32 {
    return buffer * W_SIZE + row * W_LINE + weight;
}

// The row and the unit of a slice of W that an item is, and the token and the vec4 of one of x.
fn w_part(item: u32) -> vec2<u32> {
    return vec2(item / W_UNITS, item % W_UNITS);
}

fn x_part(item: u32) -> vec2<u32> {
    return vec2(item / SLICE_VEC8S, item % SLICE_VEC8S);
}

// The row and the unit of W that an item of a slice is.
fn w_item(tile: Tile, slice: u32, item: u32) -> vec2<u32> {
    if (OVER_ROWS) {
        return vec2(slice * SLICE, tile.row / UNIT) + w_part(item);
    }
    return vec2(tile.row, slice * (SLICE / UNIT)) + w_part(item);
}

// Beyond the last row or unit, that one is fetched again; x or W is 0 there, where it would count.
fn fetch(ahead: ptr<function, Ahead>, tile: Tile, slice: u32, thread: u32) {
    for (var i = 0u; i < W_EACH; i++) {
        let item = thread + i * THREADS;
        if (W_ITEMS % THREADS == 0u || item < W_ITEMS) {
            let at = min(w_item(tile, slice, item), vec2(params.rows, params.units) - 1u);
            (*ahead).words[i] = words_of(at.x, at.y);
        }
    }
    let length = params.x_width / 8u;
    for (var i = 0u; i < X_EACH; i++) {
        let part = x_part(min(thread + i * THREADS, X_ITEMS - 1u));
        let at = params.x_first / 8u + slice * SLICE_VEC8S + part.y;
        var values = vec4(0u);
        var low = vec4(0u);
        if (at < length) {
            let row = x_row(tile, part.x) * X_PARTS;
            values = x[row * length + at];
            if (SPLIT_X) {
                low = x[(row + 1u) * length + at];
            }
        }
        (*ahead).tokens[i] = values;
        if (SPLIT_X) {
            (*ahead).low[i % LOW_EACH] = low;
        }
    }
}

// The high float16 of weights keep their first bits: compilers may take what is rounded to float16, and is float32
// again, for what it was before. The low ones wait for their phase.
fn stage_w(ahead: ptr<function, Ahead>, slice: u32, buffer: u32, thread: u32) {
    for (var i = 0u; i < W_EACH; i++) {
        let item = thread + i * THREADS;
        if (W_ITEMS % THREADS == 0u || item < W_ITEMS) {
            let weights = weights_of((*ahead).words[i]);
            let counts = !OVER_ROWS || slice * SLICE + w_part(item).x < params.rows;
            for (var j = 0u; j < UNIT_VEC4S; j++) {
                var values = select(vec4(0.0), weights[j] * W_SCALE, counts);
                if (SPLIT_W) {
                    let high = bitcast<vec4<f32>>(bitcast<vec4<u32>>(values) & vec4(0xffffe000u));
                    (*ahead).low_weights[i % LOW_W_EACH][j % LOW_VEC4S] = vec4<f16>(values - high);
                    values = high;
                }
                store_weights(vec4<f16>(values), item, j, buffer);
            }
        }
    }
}

fn stage_low_w(ahead: ptr<function, Ahead>, buffer: u32, thread: u32) {
    for (var i = 0u; i < W_EACH; i++) {
        let item = thread + i * THREADS;
        if (W_ITEMS % THREADS == 0u || item < W_ITEMS) {
            for (var j = 0u; j < UNIT_VEC4S; j++) {
                store_weights((*ahead).low_weights[i % LOW_W_EACH][j % LOW_VEC4S], item, j, buffer);
            }
        }
    }
}

// The vec4 j of an item of W.
fn store_weights(values: vec4<f16>, item: u32, j: u32, buffer: u32) {
    let part = w_part(item);
    let to = w_place(buffer, part.x, part.y * UNIT + 4u * j);
    w_tile[to] = values.x;
    w_tile[to + 1u] = values.y;
    w_tile[to + 2u] = values.z;
    w_tile[to + 3u] = values.w;
}

fn stage_x(ahead: ptr<function, Ahead>, low: bool, buffer: u32, thread: u32) {
    for (var i = 0u; i < X_EACH; i++) {
        let item = thread + i * THREADS;
        if (X_ITEMS % THREADS == 0u || item < X_ITEMS) {
            let part = x_part(item);
            let to = x_place(buffer, part.x, 8u * part.y);
            var eight = (*ahead).tokens[i];
            if (low) {
                eight = (*ahead).low[i % LOW_EACH];
            }
            for (var j = 0u; j < 4u; j++) {
                let values = bitcast<vec2<f16>>(eight[j]);
                x_tile[to + 2u * j] = values.x;
                x_tile[to + 2u * j + 1u] = values.y;
            }
        }
    }
}

// What a slice needs in a phase beside what the phases before have left.
fn stage(ahead: ptr<function, Ahead>, slice: u32, phase: u32, buffer: u32, thread: u32) {
    if (phase == 0u) {
        stage_w(ahead, slice, buffer, thread);
        stage_x(ahead, SPLIT_X, buffer, thread);
    } else if (SPLIT_X && phase == 1u) {
        stage_x(ahead, false, buffer, thread);
    } else if (SPLIT_W) {
        stage_low_w(ahead, buffer, thread);
    }
}

// By which the values of a row of x were divided; W is multiplied.
fn scale_of(row: u32) -> f32 {
    let word = params.x_rows * X_PARTS * (params.x_width / 2u) + row;
    return bitcast<f32>(x[word / 4u][word % 4u]) / W_SCALE;
}

// A subgroup's first token in the tile, its first row, and its first k of a slice.
fn subgroup_line(thread: u32) -> u32 {
    return thread / SUBGROUP % DOWN * SUB_TOKENS;
}

fn subgroup_row(thread: u32) -> u32 {
    return thread / SUBGROUP / DOWN % ACROSS * SUB_ROWS;
}

fn subgroup_k(thread: u32) -> u32 {
    return select(thread / (SUBGROUP * DOWN * ACROSS) * SHARE_K, 0u, SHARES == 1u);
}

// A matrix of every subgroup, so many tokens and rows from its first, goes through workgroup memory, where the shares
// of k are added up.
fn store_matrix(sums: Result, tile: Tile, token: u32, row: u32, thread: u32) {
    workgroupBarrier();
    subgroupMatrixStore(&results, thread / SUBGROUP * MATRIX, sums, false, MATRIX_N);
    workgroupBarrier();
    let first = thread / SUBGROUP % (DOWN * ACROSS) * MATRIX;
    let own = thread / (SUBGROUP * DOWN * ACROSS) * SUBGROUP + thread % SUBGROUP;
    for (var i = own; i < MATRIX; i += SUBGROUP * SHARES) {
        let line = subgroup_line(thread) + token + i / MATRIX_N;
        let n = tile.row + subgroup_row(thread) + row + i % MATRIX_N;
        var sum = results[first + i];
        for (var share = 1u; share < SHARES; share++) {
            sum += results[first + share * DOWN * ACROSS * MATRIX + i];
        }
        if (tile.token + line < tile.count && n < tile.end) {
            store(tile, tile.token + line, n, sum * scales[line]);
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
    return (select(params.units * UNIT, params.rows, OVER_ROWS) + SLICE - 1u) / SLICE;
}

// Stage what a phase of a slice needs, after the last phase fetch the slice that comes SLICES_AHEAD, and add products.
fn add_phase(
    sums: ptr<function, Sums>,
    ahead: ptr<function, Ahead>,
    tile: Tile,
    slice: u32,
    phase: u32,
    thread: u32,
) {
    let buffer = slice % BUFFERS;
    if (BUFFERS == 1u) { // with two, what is staged over has been read
        workgroupBarrier();
    }
    stage(ahead, slice, phase, buffer, thread);
    // Before the barrier, else compilers move it behind the products; without a condition, which costs a sixth.
    if (phase == PHASES - 1u) {
        fetch(ahead, tile, slice + SLICES_AHEAD, thread);
    }
    workgroupBarrier();
    let token = subgroup_line(thread);
    let row = subgroup_row(thread);
    let first = subgroup_k(thread);
    for (var step = 0u; step < SHARE_K; step += MATRIX_K) {
        let k = first + step;
        var right: array<Right, WIDE>;
        for (var j = 0u; j < WIDE; j++) {
            let n = row + j * MATRIX_N;
            let at = w_place(buffer, select(n, k, OVER_ROWS), select(k, n, OVER_ROWS));
            right[j] = subgroupMatrixLoad<Right>(&w_tile, at, !OVER_ROWS, W_LINE);
        }
        for (var i = 0u; i < HIGH; i++) {
            let at = x_place(buffer, token + i * MATRIX_M, k);
            let left = subgroupMatrixLoad<Left>(&x_tile, at, false, X_LINE);
            for (var j = 0u; j < WIDE; j++) {
                (*sums)[i][j] = subgroupMatrixMultiplyAccumulate(left, right[j], (*sums)[i][j]);
            }
        }
    }
}

fn add_slice(sums: ptr<function, Sums>, ahead: ptr<function, Ahead>, tile: Tile, slice: u32, thread: u32) {
    if (PHASES == 1u) { // without a loop
        add_phase(sums, ahead, tile, slice, 0u, thread);
        return;
    }
    for (var phase = 0u; phase < PHASES; phase++) {
        add_phase(sums, ahead, tile, slice, phase, thread);
    }
}

fn multiply(tile: Tile, thread: u32) {
    var sums: Sums;
    var even: Ahead; // not one that becomes the other: that would wait for it
    var odd: Ahead;
    fetch(&even, tile, tile.slice, thread);
    if (SLICES_AHEAD == 2u) {
        fetch(&odd, tile, tile.slice + 1u, thread);
    }
    for (var i = thread; i < TILE_TOKENS; i += THREADS) {
        scales[i] = scale_of(x_row(tile, i));
    }
    for (var slice = tile.slice; slice < tile.slices; slice += SLICES_AHEAD) {
        add_slice(&sums, &even, tile, slice, thread);
        if (SLICES_AHEAD == 2u && slice + 1u < tile.slices) {
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
