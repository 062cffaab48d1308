// multiply: for the rows n and tokens t of a tile, the sum over k of W[n, k] x[t, k], handed to
// store(tile, t, n, sum). A workgroup computes TILE_ROWS rows by TILE_TOKENS tokens, SLICE of k at a time
// through workgroup memory, so that one decoded weight serves all these tokens. A thread sums ROWS_EACH by
// TOKENS_EACH of them over every SPLIT-th part of a slice; at the end the SPLIT threads of the same spot add
// up. The slot `tile` says what x is: how a slice is fetched, staged in one of BUFFERS and multiplied. The op
// says which rows of x a tile reads (x_row) and what becomes of sums (store).
// uses: tile format

struct Params {
    units: u32, // of a row
}

override THREADS: u32;
override TILE_ROWS: u32;
override TILE_TOKENS: u32;
override ROWS_EACH: u32;
override TOKENS_EACH: u32;
override SLICE: u32;
override BUFFERS: u32;

const ACROSS: u32 = TILE_ROWS / ROWS_EACH; // threads along the rows
const DOWN: u32 = TILE_TOKENS / TOKENS_EACH; // threads along the tokens
const SPOTS: u32 = ACROSS * DOWN;
const SPLIT: u32 = THREADS / SPOTS;
const QUADS: u32 = ROWS_EACH / 4u; // a thread's rows, four at a time

const_assert SPLIT * SPOTS == THREADS;
const_assert DOWN % PAIR == 0u;
const_assert TOKENS_EACH == 4u || TOKENS_EACH == 8u;

alias Sums = array<array<vec4<f32>, QUADS>, TOKENS_EACH>; // of a thread

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

// Four rows of a token, ACROSS apart from each other.
fn store_quad(tile: Tile, t: u32, n: u32, sum: vec4<f32>) {
    if (n < tile.end) {
        store(tile, t, n, sum.x);
    }
    if (n + ACROSS < tile.end) {
        store(tile, t, n + ACROSS, sum.y);
    }
    if (n + 2u * ACROSS < tile.end) {
        store(tile, t, n + 2u * ACROSS, sum.z);
    }
    if (n + 3u * ACROSS < tile.end) {
        store(tile, t, n + 3u * ACROSS, sum.w);
    }
}

// What the SPLIT threads of a spot have summed for one token goes through workgroup memory to the first of
// them.
fn store_token(sums: array<vec4<f32>, QUADS>, tile: Tile, t: u32, n: u32, thread: u32) {
    for (var i = 0u; i < QUADS; i++) {
        var sum = sums[i];
        if (SPLIT > 1u) {
            workgroupBarrier();
            put_sum(sum, thread);
            workgroupBarrier();
            for (var other = thread % SPOTS + SPOTS; other < THREADS; other += SPOTS) {
                sum += get_sum(other);
            }
        }
        if (thread < SPOTS && t < tile.count) {
            store_quad(tile, t, n + 4u * i * ACROSS, sum);
        }
    }
}

fn all_slices() -> u32 {
    return (params.units * UNIT + SLICE - 1u) / SLICE;
}

fn multiply(tile: Tile, thread: u32) {
    let spot = thread % SPOTS;
    let row = spot / PAIR % ACROSS; // and every ACROSS-th after it
    let token = spot / (PAIR * ACROSS) * PAIR + spot % PAIR; // and every DOWN-th
    let share = thread / SPOTS;
    var sums: Sums;
    var ahead: Ahead; // a slice on its way, while another is multiplied
    fetch(&ahead, tile, tile.slice, thread);
    workgroupBarrier();
    for (var slice = tile.slice; slice < tile.slices; slice++) {
        if (BUFFERS == 1u) { // with two, what is staged over has been read
            workgroupBarrier();
        }
        stage(&ahead, slice % BUFFERS, tile, thread);
        workgroupBarrier();
        fetch(&ahead, tile, slice + 1u, thread);
        add_slice(&sums, slice % BUFFERS, row, token, share);
    }
    // Written out: a loop with barriers does not unroll, and its index would move the sums out of registers.
    let t = tile.token + token;
    let n = tile.row + row;
    store_token(sums[0], tile, t, n, thread);
    store_token(sums[1], tile, t + DOWN, n, thread);
    store_token(sums[2], tile, t + 2u * DOWN, n, thread);
    store_token(sums[3], tile, t + 3u * DOWN, n, thread);
    if (TOKENS_EACH > 4u) {
        store_token(sums[TOKENS_EACH - 4u], tile, t + 4u * DOWN, n, thread);
        store_token(sums[TOKENS_EACH - 3u], tile, t + 5u * DOWN, n, thread);
        store_token(sums[TOKENS_EACH - 2u], tile, t + 6u * DOWN, n, thread);
        store_token(sums[TOKENS_EACH - 1u], tile, t + 7u * DOWN, n, thread);
    }
}
