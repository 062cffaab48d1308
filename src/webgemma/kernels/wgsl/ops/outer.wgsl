// out[i, j] += scale Σ_t a[t, i] b[t, j]: what a matrix owes, from its outputs' and its inputs' rows.
// Both may be columns of longer rows. A workgroup computes a tile of 32 by 32, SLICE tokens at a time
// through workgroup memory; a thread sums four i by four j.

struct Params {
    rows: u32, // i
    columns: u32, // j
    a_stride: u32,
    a_first: u32,
    b_stride: u32,
    b_first: u32,
    scale: f32,
    first: u32, // row of out
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> a: array<f32>;
@group(0) @binding(3) var<storage, read> b: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

const TILE: u32 = 32u;
const FOURS: u32 = TILE / 4u;
const SLICE: u32 = 16u;

const_assert THREADS == FOURS * FOURS;

var<workgroup> a_tile: array<vec4<f32>, SLICE * FOURS>;
var<workgroup> b_tile: array<vec4<f32>, SLICE * FOURS>;

fn four_of_a(t: u32, i: u32) -> vec4<f32> {
    var four = vec4(0.0);
    for (var each = 0u; each < 4u; each++) {
        if (t < state.count && i + each < params.rows) {
            four[each] = a[t * params.a_stride + params.a_first + i + each];
        }
    }
    return four;
}

fn four_of_b(t: u32, j: u32) -> vec4<f32> {
    var four = vec4(0.0);
    for (var each = 0u; each < 4u; each++) {
        if (t < state.count && j + each < params.columns) {
            four[each] = b[t * params.b_stride + params.b_first + j + each];
        }
    }
    return four;
}

fn put(i: u32, j: u32, sum: vec4<f32>) {
    for (var each = 0u; each < 4u; each++) {
        if (i < params.rows && j + each < params.columns) {
            out[(params.first + i) * params.columns + j + each] += params.scale * sum[each];
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first_i = group.y * TILE;
    let first_j = group.x * TILE;
    let row = thread / FOURS;
    let column = thread % FOURS;
    var sums = mat4x4<f32>(); // a column for each i
    for (var slice = 0u; slice < state.count; slice += SLICE) {
        workgroupBarrier();
        for (var item = thread; item < SLICE * FOURS; item += THREADS) {
            let t = slice + item / FOURS;
            a_tile[item] = four_of_a(t, first_i + 4u * (item % FOURS));
            b_tile[item] = four_of_b(t, first_j + 4u * (item % FOURS));
        }
        workgroupBarrier();
        for (var t = 0u; t < SLICE; t++) {
            let left = a_tile[t * FOURS + row];
            let right = b_tile[t * FOURS + column];
            sums += mat4x4<f32>(left.x * right, left.y * right, left.z * right, left.w * right);
        }
    }
    let i = first_i + 4u * row;
    let j = first_j + 4u * column;
    put(i, j, sums[0]);
    put(i + 1u, j, sums[1]);
    put(i + 2u, j, sums[2]);
    put(i + 3u, j, sums[3]);
}
