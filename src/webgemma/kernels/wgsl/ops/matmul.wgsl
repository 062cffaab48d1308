// For each token t and row n: sum over k of W[n, k] x[t, k], handed to finish(t, n, sum). A workgroup
// computes TILE_ROWS rows by TILE_TOKENS tokens, SLICE of k at a time through workgroup memory, so
// that one decoded weight serves all these tokens. A thread sums ROWS_EACH by TOKENS_EACH of them
// over every SPLIT-th four of k; at the end the SPLIT threads of the same place add up.

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
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

const FOURS: u32 = SLICE / 4u;
const UNIT_FOURS: u32 = UNIT / 4u;
const SLICE_UNITS: u32 = max(1u, SLICE / UNIT); // either several units make a slice
const UNIT_SLICES: u32 = max(1u, UNIT / SLICE); // or several slices a unit
const ACROSS: u32 = TILE_ROWS / ROWS_EACH; // threads along the rows
const DOWN: u32 = TILE_TOKENS / TOKENS_EACH; // threads along the tokens
const PLACES: u32 = ACROSS * DOWN;
const SPLIT: u32 = THREADS / PLACES;
const QUADS: u32 = ROWS_EACH / 4u; // a thread's rows, four at a time

const_assert SLICE_UNITS * UNIT == UNIT_SLICES * SLICE;
const_assert SPLIT * PLACES == THREADS && SPLIT <= FOURS;
const_assert TOKENS_EACH == 4u || TOKENS_EACH == 8u;
const_assert SPLIT == 1u || THREADS <= TILE_ROWS * FOURS; // a sum of each thread fits into w_tile

alias Sums = array<array<vec4<f32>, QUADS>, TOKENS_EACH>; // of a thread

var<workgroup> w_tile: array<vec4<f32>, TILE_ROWS * FOURS>;
var<workgroup> x_tile: array<vec4<f32>, TILE_TOKENS * FOURS>;

// Where four k of a line of a tile stands: turned by the line, so that neighbours use other banks.
fn place(line: u32, k: u32) -> u32 {
    return line * FOURS + (k + line) % FOURS;
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

fn load_tokens(first: u32, count: u32, slice: u32, thread: u32) {
    let width = params.units * UNIT_FOURS;
    for (var item = thread; item < TILE_TOKENS * FOURS; item += THREADS) {
        let line = item / FOURS;
        let k = slice * FOURS + item % FOURS;
        var four = vec4(0.0);
        if (first + line < count && k < width) {
            four = x[(first + line) * width + k];
        }
        x_tile[place(line, item % FOURS)] = four;
    }
}

fn add_slice(sums: ptr<function, Sums>, row: u32, token: u32, share: u32) {
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

// Four rows of a token, ACROSS apart from each other.
fn finish_quad(t: u32, n: u32, sum: vec4<f32>) {
    if (n < params.rows) {
        finish(t, n, sum.x);
    }
    if (n + ACROSS < params.rows) {
        finish(t, n + ACROSS, sum.y);
    }
    if (n + 2u * ACROSS < params.rows) {
        finish(t, n + 2u * ACROSS, sum.z);
    }
    if (n + 3u * ACROSS < params.rows) {
        finish(t, n + 3u * ACROSS, sum.w);
    }
}

// What the SPLIT threads of a place have summed for one token goes through w_tile to the first of them.
fn finish_token(sums: array<vec4<f32>, QUADS>, t: u32, n: u32, count: u32, thread: u32) {
    for (var i = 0u; i < QUADS; i++) {
        var sum = sums[i];
        if (SPLIT > 1u) {
            workgroupBarrier();
            w_tile[thread] = sum;
            workgroupBarrier();
            for (var other = thread % PLACES + PLACES; other < THREADS; other += PLACES) {
                sum += w_tile[other];
            }
        }
        if (thread < PLACES && t < count) {
            finish_quad(t, n + 4u * i * ACROSS, sum);
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let first_row = (group.z * groups.x + group.x) * TILE_ROWS;
    let first_token = group.y * TILE_TOKENS;
    let count = min(state.count, params.batch);
    if (first_row >= params.rows || first_token >= count) {
        return;
    }
    let row = thread % ACROSS; // and every ACROSS-th after it
    let token = thread / ACROSS % DOWN; // and every DOWN-th
    let share = thread / PLACES;
    var sums: Sums;
    for (var slice = 0u; slice * SLICE < params.units * UNIT; slice++) {
        workgroupBarrier();
        load_weights(first_row, slice, thread);
        load_tokens(first_token, count, slice, thread);
        workgroupBarrier();
        add_slice(&sums, row, token, share);
    }
    // spelled out: a loop with barriers does not unroll, and its index would take the sums out of
    // registers
    let t = first_token + token;
    let n = first_row + row;
    finish_token(sums[0], t, n, count, thread);
    finish_token(sums[1], t + DOWN, n, count, thread);
    finish_token(sums[2], t + 2u * DOWN, n, count, thread);
    finish_token(sums[3], t + 3u * DOWN, n, count, thread);
    if (TOKENS_EACH > 4u) {
        finish_token(sums[TOKENS_EACH - 4u], t + 4u * DOWN, n, count, thread);
        finish_token(sums[TOKENS_EACH - 3u], t + 5u * DOWN, n, count, thread);
        finish_token(sums[TOKENS_EACH - 2u], t + 6u * DOWN, n, count, thread);
        finish_token(sums[TOKENS_EACH - 1u], t + 7u * DOWN, n, count, thread);
    }
}
