// dx[t, k] = sum over n of W[n, k] dy[t, n]: the way back through y = W x. A workgroup computes TILE_M
// tokens by TILE_N columns k, SLICE rows of W at a time, see lib/outer.wgsl. The rows may be cut into
// shares, along the grid's z; each share's sums are a [batch, width] of their own.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    first_row: u32, // column of dy for the first row of this part
    begin: u32, // rows of this part that the dispatch adds up
    end: u32,
    units: u32,
    stride: u32, // values of dy for each token
    batch: u32,
    share_rows: u32,
    first_share: u32, // of this part's
    add: u32, // 1: to what dx holds
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> dy: array<f32>;
@group(0) @binding(3) var<storage, read_write> dx: array<vec4<f32>>;

const UNIT_FOURS: u32 = UNIT / 4u;
const TILE_UNITS: u32 = TILE_N / UNIT;

const_assert TILE_UNITS * UNIT == TILE_N;

fn stage_gradients(token: u32, row: u32, end: u32, thread: u32) {
    for (var item = thread; item < SLICE * M_FOURS; item += THREADS) {
        let n = row + item % SLICE;
        let t = token + 4u * (item / SLICE);
        var four = vec4(0.0);
        for (var i = 0u; i < 4u; i++) {
            if (n < end && t + i < params.batch) {
                four[i] = dy[(t + i) * params.stride + params.first_row + n];
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
            weights = decode(n, u);
        }
        for (var i = 0u; i < UNIT_FOURS; i++) {
            right[right_at(item / TILE_UNITS, item % TILE_UNITS * UNIT_FOURS + i)] = weights[i];
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let token = group.y * TILE_M;
    let begin = params.begin + group.z * params.share_rows;
    let end = min(begin + params.share_rows, params.end);
    var sums: Sums;
    for (var row = begin; row < end; row += SLICE) {
        workgroupBarrier();
        stage_gradients(token, row, end, thread);
        stage_weights(group.x * TILE_UNITS, row, end, thread);
        workgroupBarrier();
        add_slice(&sums, thread);
    }
    let fours = params.units * UNIT_FOURS;
    let first = (params.first_share + group.z) * params.batch;
    for (var i = 0u; i < 4u * EACH_M; i++) {
        let t = token + own_m(thread, i);
        for (var j = 0u; j < EACH_N; j++) {
            let four = group.x * N_FOURS + own_n(thread, j) / 4u;
            if (t < params.batch && four < fours) {
                let at = (first + t) * fours + four;
                dx[at] = sums[i][j] + select(vec4(0.0), dx[at], params.add == 1u);
            }
        }
    }
}
