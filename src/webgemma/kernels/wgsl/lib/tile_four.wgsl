// fetch, stage, add_slice: as tile_float, for formats that store four weights beside each other (F32,
// F16, BF16). A thread brings four k of four lines (rows, or tokens), as they are stored, and turns
// them, so that in workgroup memory four rows, or four tokens, of one k stand together: what a thread
// reads for a k is multiplied each with each.

@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;

const PAIR: u32 = 2u; // neighbouring threads that have the same rows
const FOURS: u32 = SLICE / 4u;
const TOKEN_FOURS: u32 = TOKENS_EACH / 4u;
const W_QUADS: u32 = TILE_ROWS / 4u;
const X_QUADS: u32 = TILE_TOKENS / 4u;
const W_ITEMS: u32 = W_QUADS * FOURS; // threads that bring weights
const X_ITEMS: u32 = X_QUADS * FOURS; // and others that bring tokens
// Lines are one longer than needed, so that neighbouring lines use other banks.
const W_LINE: u32 = W_QUADS + 1u;
const X_LINE: u32 = X_QUADS + 1u;

const_assert UNIT == 4u && SPLIT == 1u && W_ITEMS + X_ITEMS <= THREADS;

alias Ahead = array<vec4<u32>, 4>; // four k of each of four lines

var<workgroup> w_tile: array<vec4<f32>, BUFFERS * SLICE * W_LINE>;
var<workgroup> x_tile: array<vec4<f32>, BUFFERS * SLICE * X_LINE>;

// Beyond the last row or k comes that one again; x is 0 there, where it would count.
fn fetch(ahead: ptr<function, Ahead>, tile: Tile, slice: u32, thread: u32) {
    let k = slice * FOURS + thread % FOURS;
    let quad = thread / FOURS;
    if (thread < W_ITEMS) {
        let first = tile.row + quad / ACROSS * 4u * ACROSS + quad % ACROSS;
        for (var i = 0u; i < 4u; i++) {
            let row = min(first + i * ACROSS, params.rows - 1u);
            (*ahead)[i] = words_of(row, min(k, params.units - 1u));
        }
    } else if (thread < W_ITEMS + X_ITEMS) {
        let line = (quad - W_QUADS) / DOWN * 4u * DOWN + (quad - W_QUADS) % DOWN;
        for (var i = 0u; i < 4u; i++) {
            var four = vec4(0.0);
            if (k < params.units) {
                four = x[x_row(tile, line + i * DOWN) * params.units + k];
            }
            (*ahead)[i] = bitcast<vec4<u32>>(four);
        }
    }
}

fn stage(ahead: ptr<function, Ahead>, buffer: u32, tile: Tile, thread: u32) {
    let k = buffer * SLICE + 4u * (thread % FOURS);
    let quad = thread / FOURS;
    if (thread < W_ITEMS) {
        let turned = transpose(mat4x4<f32>(
            opened((*ahead)[0]),
            opened((*ahead)[1]),
            opened((*ahead)[2]),
            opened((*ahead)[3]),
        ));
        for (var i = 0u; i < 4u; i++) {
            w_tile[(k + i) * W_LINE + quad] = turned[i];
        }
    } else if (thread < W_ITEMS + X_ITEMS) {
        let turned = transpose(mat4x4<f32>(
            bitcast<vec4<f32>>((*ahead)[0]),
            bitcast<vec4<f32>>((*ahead)[1]),
            bitcast<vec4<f32>>((*ahead)[2]),
            bitcast<vec4<f32>>((*ahead)[3]),
        ));
        for (var i = 0u; i < 4u; i++) {
            x_tile[(k + i) * X_LINE + quad - W_QUADS] = turned[i];
        }
    }
}

fn add_slice(sums: ptr<function, Sums>, buffer: u32, row: u32, token: u32, share: u32) {
    for (var k = 0u; k < SLICE; k++) {
        var w: array<vec4<f32>, QUADS>;
        for (var i = 0u; i < QUADS; i++) {
            w[i] = w_tile[(buffer * SLICE + k) * W_LINE + row + i * ACROSS];
        }
        for (var j = 0u; j < TOKEN_FOURS; j++) {
            let four = x_tile[(buffer * SLICE + k) * X_LINE + token + j * DOWN];
            for (var i = 0u; i < QUADS; i++) {
                (*sums)[4u * j][i] = fma(w[i], vec4(four.x), (*sums)[4u * j][i]);
                (*sums)[4u * j + 1u][i] = fma(w[i], vec4(four.y), (*sums)[4u * j + 1u][i]);
                (*sums)[4u * j + 2u][i] = fma(w[i], vec4(four.z), (*sums)[4u * j + 2u][i]);
                (*sums)[4u * j + 3u][i] = fma(w[i], vec4(four.w), (*sums)[4u * j + 3u][i]);
            }
        }
    }
}

// Never called: a place has one thread.
fn put_sum(sum: vec4<f32>, thread: u32) {}

fn get_sum(thread: u32) -> vec4<f32> {
    return vec4(0.0);
}
