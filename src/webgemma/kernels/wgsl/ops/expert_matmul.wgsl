// y[p, n] = sum over k of W[e, first + n, k] x[p / fan, k] for the places p that ask expert e: one
// workgroup for each tile of expert_sort (TOKENS places) and each ROWS rows, STEP columns at a time through
// shared memory; a thread gathers 4 rows of TOKENS / 8 places. Rows outside this part of W are left alone.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    first_row: u32, // of this part, among the rows of all experts
    rows: u32, // in this part
    units: u32,
    expert_rows: u32,
    first: u32, // row of an expert that gives y's first column
    columns: u32, // of y
    fan: u32, // places that share a row of x
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> tiles: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> places: array<u32>;
@group(0) @binding(4) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> y: array<f32>;

const SIDE: u32 = 8u; // of the square of threads
const ROWS: u32 = 4u * SIDE;
const OWN: u32 = TOKENS / SIDE;
const STEP: u32 = 64u;
const FOURS: u32 = STEP / 4u;
const UNIT_FOURS: u32 = UNIT / 4u;

const_assert THREADS == SIDE * SIDE && STEP % UNIT == 0u;

var<workgroup> weights: array<vec4<f32>, FOURS * ROWS>; // [four of k, row]
var<workgroup> inputs: array<vec4<f32>, FOURS * TOKENS>; // [four of k, place]

// Threads that store neighbouring fours of one place, or read neighbouring places, meet different banks.
fn input_at(four: u32, place: u32) -> u32 {
    return four * TOKENS + (place ^ (four % SIDE));
}

fn load_weights(n: u32, row: u32, unit: u32, thread: u32) {
    for (var i = thread; i < ROWS * STEP / UNIT; i += THREADS) {
        let r = i % ROWS;
        let u = i / ROWS;
        var decoded = array<vec4<f32>, UNIT_FOURS>(); // in a loop, naga zeroes no var by itself
        if (n + r < params.columns && row + r < params.rows && unit + u < params.units) {
            decoded = decode(row + r, unit + u);
        }
        for (var k = 0u; k < UNIT_FOURS; k++) {
            weights[(u * UNIT_FOURS + k) * ROWS + r] = decoded[k];
        }
    }
}

fn load_inputs(tile: vec4<u32>, unit: u32, thread: u32) {
    let fours = params.units * UNIT_FOURS;
    for (var i = thread; i < FOURS * TOKENS; i += THREADS) {
        let four = unit * UNIT_FOURS + i % FOURS;
        let at = tile.y + i / FOURS;
        var value = vec4(0.0);
        if (at < tile.z && four < fours) {
            value = x[places[at] / params.fan * fours + four];
        }
        inputs[input_at(i % FOURS, i / FOURS)] = value;
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let tile = tiles[group.y];
    let n = group.x * ROWS;
    let row = tile.x * params.expert_rows + params.first + n - params.first_row; // wraps below the first
    if (tile.y == tile.z || bitcast<i32>(row) >= i32(params.rows) || bitcast<i32>(row + ROWS) <= 0) {
        return;
    }
    let lane = thread % SIDE;
    let place = thread / SIDE;
    var sums: array<vec4<f32>, OWN>;
    for (var unit = 0u; unit < params.units; unit += STEP / UNIT) {
        workgroupBarrier();
        load_weights(n, row, unit, thread);
        load_inputs(tile, unit, thread);
        workgroupBarrier();
        for (var k = 0u; k < FOURS; k++) {
            let at = k * ROWS + lane;
            let w = transpose(mat4x4<f32>( // a column is one k of four rows
                weights[at],
                weights[at + SIDE],
                weights[at + 2u * SIDE],
                weights[at + 3u * SIDE],
            ));
            for (var own = 0u; own < OWN; own++) {
                let v = inputs[input_at(k, place + own * SIDE)];
                let sum = fma(w[1], vec4(v.y), fma(w[0], vec4(v.x), sums[own]));
                sums[own] = fma(w[3], vec4(v.w), fma(w[2], vec4(v.z), sum));
            }
        }
    }
    for (var own = 0u; own < OWN; own++) {
        let at = tile.y + place + own * SIDE;
        if (at < tile.z) {
            let to = places[at] * params.columns + n;
            for (var i = 0u; i < 4u; i++) {
                let r = lane + i * SIDE;
                if (n + r < params.columns && row + r < params.rows) {
                    y[to + r] = sums[own][i];
                }
            }
        }
    }
}
