// dx[t, k] = scale Σ_n dy[t, n] W[n, k]: what a product's input owes. A workgroup computes TILE_WIDTH k of
// TILE_TOKENS tokens, SLICE rows n at a time through workgroup memory; a thread sums four k of four
// tokens. The rows are `rows` from `row` on of this part of W; what another call has summed before
// is added if `add` says so.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    row: u32,
    rows: u32,
    units: u32,
    stride: u32, // values of dy for each token
    first: u32, // column of dy that belongs to `row`
    add: u32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> state: State;
@group(0) @binding(3) var<storage, read> dy: array<f32>;
@group(0) @binding(4) var<storage, read_write> dx: array<vec4<f32>>;

const TILE_WIDTH: u32 = 64u; // as many as the largest unit has
const TILE_TOKENS: u32 = 32u;
const SLICE: u32 = 32u;
const FOURS: u32 = TILE_WIDTH / 4u;
const UNIT_FOURS: u32 = UNIT / 4u;
const UNITS: u32 = TILE_WIDTH / UNIT;
const TOKEN_FOURS: u32 = TILE_TOKENS / 4u;

const_assert THREADS == FOURS * TOKEN_FOURS;

var<workgroup> w_tile: array<vec4<f32>, SLICE * FOURS>;
var<workgroup> dy_tile: array<vec4<f32>, SLICE * TOKEN_FOURS>; // of a row, four tokens together

fn load_weights(slice: u32, column: u32, thread: u32) {
    for (var item = thread; item < SLICE * UNITS; item += THREADS) {
        let line = item / UNITS;
        let unit = column * UNITS + item % UNITS;
        let n = slice * SLICE + line;
        var weights = array<vec4<f32>, UNIT_FOURS>();
        if (n < params.rows && unit < params.units) {
            weights = decode(params.row + n, unit);
        }
        for (var i = 0u; i < UNIT_FOURS; i++) {
            w_tile[line * FOURS + item % UNITS * UNIT_FOURS + i] = weights[i];
        }
    }
}

fn load_gradients(slice: u32, token: u32, thread: u32) {
    for (var item = thread; item < SLICE * TOKEN_FOURS; item += THREADS) {
        let n = slice * SLICE + item % SLICE; // neighbours read neighbours
        let t = token + item / SLICE * 4u;
        var four = vec4(0.0);
        if (n < params.rows) {
            for (var i = 0u; i < 4u; i++) {
                if (t + i < state.count) {
                    four[i] = dy[(t + i) * params.stride + params.first + n];
                }
            }
        }
        dy_tile[item % SLICE * TOKEN_FOURS + item / SLICE] = four;
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let token = group.y * TILE_TOKENS;
    if (token >= state.count) {
        return;
    }
    let k = thread % FOURS;
    let tokens = thread / FOURS;
    var a = vec4(0.0);
    var b = vec4(0.0);
    var c = vec4(0.0);
    var d = vec4(0.0);
    for (var slice = 0u; slice * SLICE < params.rows; slice++) {
        workgroupBarrier();
        load_weights(slice, group.x, thread);
        load_gradients(slice, token, thread);
        workgroupBarrier();
        for (var n = 0u; n < SLICE; n++) {
            let w = w_tile[n * FOURS + k];
            let four = dy_tile[n * TOKEN_FOURS + tokens];
            a = fma(w, vec4(four.x), a);
            b = fma(w, vec4(four.y), b);
            c = fma(w, vec4(four.z), c);
            d = fma(w, vec4(four.w), d);
        }
    }
    let width = params.units * UNIT_FOURS;
    let column = group.x * FOURS + k;
    if (column < width) {
        put(token + 4u * tokens, width, column, a);
        put(token + 4u * tokens + 1u, width, column, b);
        put(token + 4u * tokens + 2u, width, column, c);
        put(token + 4u * tokens + 3u, width, column, d);
    }
}

fn put(t: u32, width: u32, column: u32, sum: vec4<f32>) {
    if (t < state.count) {
        let at = t * width + column;
        if (params.add == 1u) {
            dx[at] += params.scale * sum;
        } else {
            dx[at] = params.scale * sum;
        }
    }
}
