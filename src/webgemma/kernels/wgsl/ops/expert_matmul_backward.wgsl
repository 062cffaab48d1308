// dx[row of s, k] = sum over n of W[e, n, k] dy[s, column + n] for the slots s that are routed to expert e and its
// rows n: the backward pass of expert_matmul. A workgroup for each tile of expert_sort and TILE_N columns k,
// see outer_product. An expert whose rows began in an earlier part of W is added to. In dx, the rows of the
// same slot number are together.
// uses: outer_product right_operand format

struct Params {
    first_row: u32, // of this part, among the rows of all experts
    rows: u32, // in this part
    units: u32,
    expert_rows: u32,
    stride: u32, // values of dy for each slot
    column: u32, // of dy, for an expert's first row
    fan: u32, // slots of a token
    tokens: u32,
    add: u32, // 1: to what dx holds
}

override THREADS: u32;
override EACH_M: u32;
override EACH_N: u32;
override SLICE: u32;

var<storage, read> tiles: array<vec4<u32>>;
var<storage, read> slots: array<u32>;
var<storage, read> dy: array<f32>;
var<storage, read_write> dx: array<vec4<f32>>;

struct Tile {
    begin: u32, // of its rows, among those of all experts
    end: u32,
    part: u32, // the first row of this part of W
    unit: u32, // its first
    start: u32, // row of the expert's first
    slots: u32, // its first, and where they end
    slots_end: u32,
}

// Neighbouring threads read neighbouring columns of dy.
fn left_index(item: u32) -> vec2<u32> {
    return vec2(item % SLICE, item / SLICE);
}

fn left_value(tile: Tile, n: u32, m: u32) -> f32 {
    let slot = slots[min(tile.slots + m, tile.slots_end - 1u)];
    return dy[slot * params.stride + params.column + n - tile.start];
}

fn left_staged(values: vec4<f32>, m: u32) -> vec4<f32> {
    return values;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let sorted = tiles[group.y]; // expert, begin, end
    let start = sorted.x * params.expert_rows; // rows among those of all experts
    let begin = max(start, params.first_row);
    let end = min(start + params.expert_rows, params.first_row + params.rows);
    if (begin >= end || sorted.y >= sorted.z) {
        return;
    }
    let unit = group.x * TILE_UNITS;
    var sums: Sums;
    add_up(&sums, Tile(begin, end, params.first_row, unit, start, sorted.y, sorted.z), thread);
    let vec4s = params.units * UNIT_VEC4S;
    let add = params.add == 1u || start < params.first_row;
    for (var i = 0u; i < 4u * EACH_M; i++) {
        let entry = sorted.y + sum_m(thread, i);
        if (entry >= sorted.z) {
            continue;
        }
        let slot = slots[entry];
        let line = (slot % params.fan * params.tokens + slot / params.fan) * vec4s;
        for (var j = 0u; j < EACH_N; j++) {
            let column = group.x * N_VEC4S + sum_n(thread, j);
            if (column < vec4s) {
                var before = vec4(0.0);
                if (add) {
                    before = dx[line + column];
                }
                dx[line + column] = before + sums[i][j];
            }
        }
    }
}
