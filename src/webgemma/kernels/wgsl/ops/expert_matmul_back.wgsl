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

const UNIT_FOURS: u32 = UNIT / 4u;
const TILE_UNITS: u32 = TILE_N / UNIT;

const_assert TILE_UNITS * UNIT == TILE_N;

fn stage_gradients(sorted: vec4<u32>, row: u32, end: u32, thread: u32) {
    let start = sorted.x * params.expert_rows;
    for (var item = thread; item < SLICE * M_FOURS; item += THREADS) {
        let n = row + item % SLICE;
        let entry = sorted.y + 4u * (item / SLICE);
        var four = vec4(0.0);
        for (var i = 0u; i < 4u; i++) {
            if (n < end && entry + i < sorted.z) {
                four[i] = dy[places[entry + i] * params.stride + params.column + n - start];
            }
        }
        left[left_at(item % SLICE, item / SLICE)] = four;
    }
}

fn stage_weights(unit: u32, row: u32, end: u32, thread: u32) {
    for (var item = thread; item < SLICE * TILE_UNITS; item += THREADS) {
        let n = row + item / TILE_UNITS;
        let u = unit + item % TILE_UNITS;
        var weights = array<vec4<f32>, UNIT_FOURS>(); // naga zeroes a bare `var` only once
        if (n < end && u < params.units) {
            weights = decode(n - params.first_row, u);
        }
        for (var i = 0u; i < UNIT_FOURS; i++) {
            right[right_at(item / TILE_UNITS, item % TILE_UNITS * UNIT_FOURS + i)] = weights[i];
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let sorted = tiles[group.y]; // expert, begin, end
    let start = sorted.x * params.expert_rows; // rows among those of all experts
    let begin = max(start, params.first_row);
    let end = min(start + params.expert_rows, params.first_row + params.rows);
    var sums: Sums;
    if (begin < end && sorted.y < sorted.z) {
        for (var row = begin; row < end; row += SLICE) {
            workgroupBarrier();
            stage_gradients(sorted, row, end, thread);
            stage_weights(group.x * TILE_UNITS, row, end, thread);
            workgroupBarrier();
            add_slice(&sums, thread);
        }
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
                let four = group.x * N_FOURS + own_n(thread, j) / 4u;
                if (four < fours) {
                    let at = line + four;
                    dx[at] = sums[i][j] + select(vec4(0.0), dx[at], add);
                }
            }
        }
    }
}
