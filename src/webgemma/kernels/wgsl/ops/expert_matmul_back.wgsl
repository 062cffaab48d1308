// dx[row of p, k] = sum over n of W[e, n, k] dy[p, column + n] for the places p that ask expert e and its
// rows n: the way back through expert_matmul. A workgroup for each tile of expert_sort and TILE_N columns
// k, see lib/outer.wgsl. An expert whose rows began in an earlier part of W is added to. The row of a
// place: places of the same slot lie together.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    first_row: u32, // of this part, among the rows of all experts
    rows: u32, // in this part
    units: u32,
    expert_rows: u32,
    stride: u32, // values of dy for each place
    column: u32, // of dy, for an expert's first row
    fan: u32, // slots of a token
    batch: u32,
    add: u32, // 1: to what dx holds
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> tiles: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> places: array<u32>;
@group(0) @binding(4) var<storage, read> dy: array<f32>;
@group(0) @binding(5) var<storage, read_write> dx: array<vec4<f32>>;

struct Tile {
    begin: u32, // of its rows, among those of all experts
    end: u32,
    part: u32, // the first row of this part of W
    unit: u32, // its first
    start: u32, // row of the expert's first
    places: u32, // its first, and where they end
    places_end: u32,
}

// Neighbouring threads read neighbouring columns of dy.
fn left_place(item: u32) -> vec2<u32> {
    return vec2(item % SLICE, item / SLICE);
}

fn left_value(tile: Tile, n: u32, m: u32) -> f32 {
    let place = places[min(tile.places + m, tile.places_end - 1u)];
    return dy[place * params.stride + params.column + n - tile.start];
}

fn left_staged(four: vec4<f32>, m_four: u32) -> vec4<f32> {
    return four;
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
    sum_up(&sums, Tile(begin, end, params.first_row, unit, start, sorted.y, sorted.z), thread);
    let fours = params.units * UNIT_FOURS;
    let add = params.add == 1u || start < params.first_row;
    for (var i = 0u; i < 4u * EACH_M; i++) {
        let entry = sorted.y + own_m(thread, i);
        if (entry >= sorted.z) {
            continue;
        }
        let place = places[entry];
        let line = (place % params.fan * params.batch + place / params.fan) * fours;
        for (var j = 0u; j < EACH_N; j++) {
            let four = group.x * N_FOURS + own_four(thread, j);
            if (four < fours) {
                var before = vec4(0.0);
                if (add) {
                    before = dx[line + four];
                }
                dx[line + four] = before + sums[i][j];
            }
        }
    }
}
