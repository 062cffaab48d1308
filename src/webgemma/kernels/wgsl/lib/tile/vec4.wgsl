// fetch, stage, add_slice: as tile/float, for formats that store four weights beside each other (F32, F16,
// BF16). A thread fetches four k of four lines (rows, or tokens) as they are stored and transposes them, so
// that in workgroup memory four rows, or four tokens, of one k are together: what a thread reads for a k is
// multiplied each with each.
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

const PAIR: u32 = 2u; // neighbouring threads that have the same rows
const SLICE_VEC4S: u32 = SLICE / 4u;
const TOKEN_VEC4S: u32 = TOKENS_EACH / 4u;
const W_QUADS: u32 = TILE_ROWS / 4u;
const X_QUADS: u32 = TILE_TOKENS / 4u;
const W_ITEMS: u32 = W_QUADS * SLICE_VEC4S; // threads that fetch weights
const X_ITEMS: u32 = X_QUADS * SLICE_VEC4S; // and others that fetch tokens
// Lines are one longer than needed, so that neighbouring lines use other banks.
const W_LINE: u32 = W_QUADS + 1u;
const X_LINE: u32 = X_QUADS + 1u;

const_assert UNIT == 4u && SPLIT == 1u && W_ITEMS + X_ITEMS <= THREADS;

alias Ahead = array<vec4<u32>, 4>; // four k of each of four lines

var<workgroup> w_tile: array<vec4<f32>, BUFFERS * SLICE * W_LINE>;
var<workgroup> x_tile: array<vec4<f32>, BUFFERS * SLICE * X_LINE>;

// Beyond the last row or k, that one is fetched again; x is 0 there, where it would count.
fn fetch(ahead: ptr<function, Ahead>, tile: Tile, slice: u32, thread: u32) {
    let k = slice * SLICE_VEC4S + thread % SLICE_VEC4S;
    let quad = thread / SLICE_VEC4S;
    if (thread < W_ITEMS) {
        let first = tile.row + quad / ACROSS * 4u * ACROSS + quad % ACROSS;
        for (var i = 0u; i < 4u; i++) {
            let row = min(first + i * ACROSS, params.rows - 1u);
            (*ahead)[i] = words_of(row, min(k, params.units - 1u));
        }
    } else if (thread < W_ITEMS + X_ITEMS) {
        let line = (quad - W_QUADS) / DOWN * 4u * DOWN + (quad - W_QUADS) % DOWN;
        for (var i = 0u; i < 4u; i++) {
            var values = vec4(0.0);
            if (k < params.units) {
                values = x[x_row(tile, line + i * DOWN) * params.units + k];
            }
            (*ahead)[i] = bitcast<vec4<u32>>(values);
        }
    }
}

fn stage(ahead: ptr<function, Ahead>, buffer: u32, tile: Tile, thread: u32) {
    let k = buffer * SLICE + 4u * (thread % SLICE_VEC4S);
    let quad = thread / SLICE_VEC4S;
    if (thread < W_ITEMS) {
        let columns = transpose(mat4x4<f32>(
            floats_of((*ahead)[0]),
            floats_of((*ahead)[1]),
            floats_of((*ahead)[2]),
            floats_of((*ahead)[3]),
        ));
        for (var i = 0u; i < 4u; i++) {
            w_tile[(k + i) * W_LINE + quad] = columns[i];
        }
    } else if (thread < W_ITEMS + X_ITEMS) {
        let columns = transpose(mat4x4<f32>(
            bitcast<vec4<f32>>((*ahead)[0]),
            bitcast<vec4<f32>>((*ahead)[1]),
            bitcast<vec4<f32>>((*ahead)[2]),
            bitcast<vec4<f32>>((*ahead)[3]),
        ));
        for (var i = 0u; i < 4u; i++) {
            x_tile[(k + i) * X_LINE + quad - W_QUADS] = columns[i];
        }
    }
}

fn add_slice(sums: ptr<function, Sums>, buffer: u32, row: u32, token: u32, share: u32) {
    for (var k = 0u; k < SLICE; k++) {
        var w: array<vec4<f32>, QUADS>;
        for (var i = 0u; i < QUADS; i++) {
            w[i] = w_tile[(buffer * SLICE + k) * W_LINE + row + i * ACROSS];
        }
        for (var j = 0u; j < TOKEN_VEC4S; j++) {
            let values = x_tile[(buffer * SLICE + k) * X_LINE + token + j * DOWN];
            for (var i = 0u; i < QUADS; i++) {
                (*sums)[4u * j][i] = fma(w[i], vec4(values.x), (*sums)[4u * j][i]);
                (*sums)[4u * j + 1u][i] = fma(w[i], vec4(values.y), (*sums)[4u * j + 1u][i]);
                (*sums)[4u * j + 2u][i] = fma(w[i], vec4(values.z), (*sums)[4u * j + 2u][i]);
                (*sums)[4u * j + 3u][i] = fma(w[i], vec4(values.w), (*sums)[4u * j + 3u][i]);
            }
        }
    }
}

// Never called: a spot has one thread.
fn put_sum(sum: vec4<f32>, thread: u32) {}

fn get_sum(thread: u32) -> vec4<f32> {
    return vec4(0.0);
}
