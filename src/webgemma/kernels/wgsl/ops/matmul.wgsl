// For each token t and row n: sum over k of W[n, k] x[t, k], handed to finish(t, n, sum). A workgroup
// computes TILE_ROWS rows by TILE_TOKENS tokens, SLICE of k at a time through workgroup memory, so
// that one decoded weight serves all these tokens. A thread sums ROWS_EACH by TOKENS_EACH of them
// over every SPLIT-th part of a slice; at the end the SPLIT threads of the same place add up.
// tile_float or tile_integer says what x is: how a slice is fetched, staged and multiplied.

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
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

const ACROSS: u32 = TILE_ROWS / ROWS_EACH; // threads along the rows
const DOWN: u32 = TILE_TOKENS / TOKENS_EACH; // threads along the tokens
const PLACES: u32 = ACROSS * DOWN;
const SPLIT: u32 = THREADS / PLACES;
const QUADS: u32 = ROWS_EACH / 4u; // a thread's rows, four at a time

const_assert SPLIT * PLACES == THREADS;
const_assert TOKENS_EACH == 4u || TOKENS_EACH == 8u;

alias Sums = array<array<vec4<f32>, QUADS>, TOKENS_EACH>; // of a thread

struct Tile {
    row: u32, // its first
    token: u32, // its first
    count: u32, // tokens of the batch
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

// What the SPLIT threads of a place have summed for one token goes through workgroup memory to the
// first of them.
fn finish_token(sums: array<vec4<f32>, QUADS>, t: u32, n: u32, count: u32, thread: u32) {
    for (var i = 0u; i < QUADS; i++) {
        var sum = sums[i];
        if (SPLIT > 1u) {
            workgroupBarrier();
            put_sum(sum, thread);
            workgroupBarrier();
            for (var other = thread % PLACES + PLACES; other < THREADS; other += PLACES) {
                sum += get_sum(other);
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
    let tile = Tile(
        (group.z * groups.x + group.x) * TILE_ROWS,
        group.y * TILE_TOKENS,
        min(state.count, params.batch),
    );
    if (tile.row >= params.rows || tile.token >= tile.count) {
        return;
    }
    let row = thread % ACROSS; // and every ACROSS-th after it
    let token = thread / ACROSS % DOWN; // and every DOWN-th
    let share = thread / PLACES;
    var sums: Sums;
    var ahead: Ahead; // a slice on its way, while another is multiplied
    fetch(&ahead, tile, 0u, thread);
    for (var slice = 0u; slice * SLICE < params.units * UNIT; slice++) {
        workgroupBarrier();
        stage(&ahead, tile, thread);
        workgroupBarrier();
        fetch(&ahead, tile, slice + 1u, thread);
        add_slice(&sums, row, token, share);
    }
    // spelled out: a loop with barriers does not unroll, and its index would take the sums out of
    // registers
    let t = tile.token + token;
    let n = tile.row + row;
    finish_token(sums[0], t, n, tile.count, thread);
    finish_token(sums[1], t + DOWN, n, tile.count, thread);
    finish_token(sums[2], t + 2u * DOWN, n, tile.count, thread);
    finish_token(sums[3], t + 3u * DOWN, n, tile.count, thread);
    if (TOKENS_EACH > 4u) {
        finish_token(sums[TOKENS_EACH - 4u], t + 4u * DOWN, n, tile.count, thread);
        finish_token(sums[TOKENS_EACH - 3u], t + 5u * DOWN, n, tile.count, thread);
        finish_token(sums[TOKENS_EACH - 2u], t + 6u * DOWN, n, tile.count, thread);
        finish_token(sums[TOKENS_EACH - 1u], t + 7u * DOWN, n, tile.count, thread);
    }
}
