// dx[t, k] = sum over n of W[n, k] dy[t, n], as matmul_backward, but without barriers: for software GPUs. A thread
// computes TOKENS tokens by a unit of columns.
// uses: format

struct Params {
    first_row: u32, // column of dy for the first row of this part
    begin: u32, // rows of this part that the dispatch adds up
    end: u32,
    units: u32,
    stride: u32, // values of dy for each token
    tokens: u32,
    split_rows: u32,
    first_split: u32, // of this part's
    add: u32, // 1: to what dx holds
}

override THREADS: u32;
override TOKENS: u32;

var<storage, read> dy: array<f32>;
var<storage, read_write> dx: array<vec4<f32>>;

const UNIT_VEC4S: u32 = UNIT / 4u;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let unit = group.x * THREADS + thread;
    let token = group.y * TOKENS;
    let begin = params.begin + group.z * params.split_rows;
    let end = min(begin + params.split_rows, params.end);
    if (unit >= params.units) {
        return;
    }
    var sums: array<array<vec4<f32>, UNIT_VEC4S>, TOKENS>;
    for (var row = begin; row < end; row++) {
        let weights = decode(row, unit);
        for (var t = 0u; t < TOKENS; t++) {
            let line = min(token + t, params.tokens - 1u) * params.stride;
            let gradient = dy[line + params.first_row + row];
            for (var i = 0u; i < UNIT_VEC4S; i++) {
                sums[t][i] = fma(vec4(gradient), weights[i], sums[t][i]);
            }
        }
    }
    let vec4s = params.units * UNIT_VEC4S;
    for (var t = 0u; t < TOKENS; t++) {
        if (token + t < params.tokens) {
            let line = (params.first_split + group.z) * params.tokens + token + t;
            for (var i = 0u; i < UNIT_VEC4S; i++) {
                let at = line * vec4s + unit * UNIT_VEC4S + i;
                dx[at] = sums[t][i] + select(vec4(0.0), dx[at], params.add == 1u);
            }
        }
    }
}
