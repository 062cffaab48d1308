// dx[t, k] = sum over n of W[n, k] dy[t, n], as matmul_back, but without barriers: for adapters that are
// CPUs. A thread computes TOKENS tokens by a unit of columns.

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

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let unit = group.x * THREADS + thread;
    let token = group.y * TOKENS;
    let begin = params.begin + group.z * params.share_rows;
    let end = min(begin + params.share_rows, params.end);
    if (unit >= params.units) {
        return;
    }
    var sums: array<array<vec4<f32>, UNIT_FOURS>, TOKENS>;
    for (var row = begin; row < end; row++) {
        let weights = decode(row, unit);
        for (var t = 0u; t < TOKENS; t++) {
            let line = min(token + t, params.batch - 1u) * params.stride;
            let step = dy[line + params.first_row + row];
            for (var i = 0u; i < UNIT_FOURS; i++) {
                sums[t][i] = fma(vec4(step), weights[i], sums[t][i]);
            }
        }
    }
    let fours = params.units * UNIT_FOURS;
    for (var t = 0u; t < TOKENS; t++) {
        if (token + t < params.batch) {
            let line = (params.first_share + group.z) * params.batch + token + t;
            for (var i = 0u; i < UNIT_FOURS; i++) {
                let at = line * fours + unit * UNIT_FOURS + i;
                dx[at] = sums[t][i] + select(vec4(0.0), dx[at], params.add == 1u);
            }
        }
    }
}
