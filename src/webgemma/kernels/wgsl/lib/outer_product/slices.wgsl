// add_up: sums[m, n] += left[k, m] * right[k, n] over the k of a tile, by a workgroup for its TILE_M by
// TILE_N; a thread sums 4 * EACH_M by 4 * EACH_N. Slices of k go through workgroup memory, vec4s along m and
// along n. With AHEAD, the next slice is on its way while one is added up; with two BUFFERS a slice takes one
// barrier. The op says what a tile is and fetches the left side, a value at a time: left_index, left_value,
// left_staged. The right side, an item at a time, is fetch_right and stage_right: the op's, or those of
// right_operand/weights. Beyond the last k, left is 0; elsewhere beyond the end may come any finite value.

override THREADS: u32;
override TILE_M: u32;
override TILE_N: u32;
override EACH_M: u32;
override EACH_N: u32;
override SLICE: u32;
override BUFFERS: u32;
override AHEAD: bool;
override SKIP: bool; // slices whose left is all 0

const M_VEC4S: u32 = TILE_M / 4u;
const N_VEC4S: u32 = TILE_N / 4u;
const ACROSS: u32 = N_VEC4S / EACH_N; // threads along n
const DOWN: u32 = M_VEC4S / EACH_M; // threads along m
const LEFT_ITEMS: u32 = SLICE * M_VEC4S;
const LEFT_EACH: u32 = (LEFT_ITEMS + THREADS - 1u) / THREADS;
const RIGHT_EACH: u32 = (RIGHT_ITEMS + THREADS - 1u) / THREADS;
// Lines are one longer than needed, so that neighbouring lines use other banks.
const LEFT_SIZE: u32 = SLICE * (M_VEC4S + 1u);
const RIGHT_SIZE: u32 = SLICE * (N_VEC4S + 1u);
const BLOCKS: bool = ACROSS % 8u == 0u && DOWN % 4u == 0u; // 32 threads are 8 across, 4 down
const BLOCKS_ACROSS: u32 = max(1u, ACROSS / 8u);

const_assert ACROSS * DOWN == THREADS;

alias Sums = array<array<vec4<f32>, EACH_N>, 4u * EACH_M>; // of a thread: vec4s along n

var<workgroup> left: array<vec4<f32>, BUFFERS * LEFT_SIZE>;
var<workgroup> right: array<vec4<f32>, BUFFERS * RIGHT_SIZE>;
var<workgroup> last_nonzero: array<atomic<u32>, BUFFERS>; // the last slice whose left was not all 0

// Of m, a vec4 holds every M_VEC4S-th, so that neighbouring threads read and write neighbours.
fn left_at(buffer: u32, k: u32, m: u32) -> u32 {
    return buffer * LEFT_SIZE + k * (M_VEC4S + 1u) + m;
}

fn right_at(buffer: u32, k: u32, n: u32) -> u32 {
    return buffer * RIGHT_SIZE + k * (N_VEC4S + 1u) + n;
}

fn across(thread: u32) -> u32 {
    if (BLOCKS) {
        return thread / 2u % 8u + thread / 32u % BLOCKS_ACROSS * 8u;
    }
    return thread % ACROSS;
}

fn down(thread: u32) -> u32 {
    if (BLOCKS) {
        return thread % 2u + thread / 16u % 2u * 2u + thread / (32u * BLOCKS_ACROSS) * 4u;
    }
    return thread / ACROSS;
}

// The position of a thread's sums in the tile: m, and the vec4 along n.
fn sum_m(thread: u32, i: u32) -> u32 {
    return down(thread) + i / 4u * DOWN + i % 4u * M_VEC4S;
}

fn sum_n(thread: u32, j: u32) -> u32 {
    return across(thread) + j * ACROSS;
}

fn fetch_left(tile: Tile, k: u32, item: u32) -> vec4<f32> {
    let index = left_index(item);
    let row = min(k + index.x, tile.end - 1u);
    return vec4(
        left_value(tile, row, index.y),
        left_value(tile, row, index.y + M_VEC4S),
        left_value(tile, row, index.y + 2u * M_VEC4S),
        left_value(tile, row, index.y + 3u * M_VEC4S),
    );
}

fn stage_left(fetched: vec4<f32>, tile: Tile, k: u32, buffer: u32, item: u32) {
    let index = left_index(item);
    let values = select(vec4(0.0), left_staged(fetched, index.y), k + index.x < tile.end);
    left[left_at(buffer, index.x, index.y)] = values;
    if (SKIP && any(values != vec4(0.0))) {
        atomicStore(&last_nonzero[buffer], k + 1u);
    }
}

// What a thread fetches of a slice.
struct Ahead {
    left: array<vec4<f32>, LEFT_EACH>,
    right: array<Fetched, RIGHT_EACH>,
}

fn fetch(ahead: ptr<function, Ahead>, tile: Tile, k: u32, thread: u32) {
    for (var i = 0u; i < LEFT_EACH; i++) {
        (*ahead).left[i] = fetch_left(tile, k, min(thread + i * THREADS, LEFT_ITEMS - 1u));
    }
    for (var i = 0u; i < RIGHT_EACH; i++) {
        (*ahead).right[i] = fetch_right(tile, k, min(thread + i * THREADS, RIGHT_ITEMS - 1u));
    }
}

fn stage(ahead: ptr<function, Ahead>, tile: Tile, k: u32, buffer: u32, thread: u32) {
    for (var i = 0u; i < LEFT_EACH; i++) {
        if (thread + i * THREADS < LEFT_ITEMS) {
            stage_left((*ahead).left[i], tile, k, buffer, thread + i * THREADS);
        }
    }
    for (var i = 0u; i < RIGHT_EACH; i++) {
        if (thread + i * THREADS < RIGHT_ITEMS) {
            stage_right((*ahead).right[i], buffer, thread + i * THREADS);
        }
    }
}

// Without anything on its way: loops that no compiler unrolls.
fn load(tile: Tile, k: u32, thread: u32) {
    for (var item = thread; item < LEFT_ITEMS; item += THREADS) {
        stage_left(fetch_left(tile, k, item), tile, k, 0u, item);
    }
    for (var item = thread; item < RIGHT_ITEMS; item += THREADS) {
        stage_right(fetch_right(tile, k, item), 0u, item);
    }
}

fn add_slice(sums: ptr<function, Sums>, buffer: u32, thread: u32) {
    for (var k = 0u; k < SLICE; k++) {
        var b: array<vec4<f32>, EACH_N>;
        for (var j = 0u; j < EACH_N; j++) {
            b[j] = right[right_at(buffer, k, sum_n(thread, j))];
        }
        for (var i = 0u; i < EACH_M; i++) {
            let a = left[left_at(buffer, k, down(thread) + i * DOWN)];
            for (var j = 0u; j < EACH_N; j++) {
                (*sums)[4u * i][j] = fma(vec4(a.x), b[j], (*sums)[4u * i][j]);
                (*sums)[4u * i + 1u][j] = fma(vec4(a.y), b[j], (*sums)[4u * i + 1u][j]);
                (*sums)[4u * i + 2u][j] = fma(vec4(a.z), b[j], (*sums)[4u * i + 2u][j]);
                (*sums)[4u * i + 3u][j] = fma(vec4(a.w), b[j], (*sums)[4u * i + 3u][j]);
            }
        }
    }
}

fn add_up(sums: ptr<function, Sums>, tile: Tile, thread: u32) {
    if (!AHEAD) {
        for (var k = tile.begin; k < tile.end; k += SLICE) {
            workgroupBarrier();
            load(tile, k, thread);
            workgroupBarrier();
            add_slice(sums, 0u, thread);
        }
        return;
    }
    var ahead: Ahead;
    fetch(&ahead, tile, tile.begin, thread);
    var buffer = 0u;
    for (var k = tile.begin; k < tile.end; k += SLICE) {
        if (BUFFERS == 1u) {
            workgroupBarrier();
        }
        stage(&ahead, tile, k, buffer, thread);
        workgroupBarrier();
        fetch(&ahead, tile, k + SLICE, thread);
        if (!SKIP || atomicLoad(&last_nonzero[buffer]) == k + 1u) {
            add_slice(sums, buffer, thread);
        }
        buffer = (buffer + 1u) % BUFFERS;
    }
}
