// The highest logit W[id] y[t] among the tokens of each cluster, with its token, if the cluster's score is one of the
// `nearest` highest of its row; LOWEST for the others. W may be a part of a table, whose other rows are left out. One
// workgroup for each cluster and row; LANES threads share a token.
// uses: lane_sum workgroup_best workgroup_sum format

struct Params {
    first_row: u32, // of this part of the table
    rows: u32,
    units: u32, // of a row
    nearest: u32,
    size: u32, // tokens of a cluster
    first: u32, // where the results of this part begin
    stride: u32, // results of a row
}

override THREADS: u32;
override LANES: u32;

var<storage, read> scores: array<f32>; // [row, cluster]
var<storage, read> ordering: array<u32>; // [cluster, size]: ids
var<storage, read> y: array<vec4<f32>>; // [row, width]
var<storage, read_write> bests: array<Best>; // [row, part, cluster]

const UNIT_VEC4S: u32 = UNIT / 4u;

var<workgroup> nearer: u32; // clusters

fn is_near(t: u32, cluster: u32, clusters: u32, thread: u32) -> bool {
    let own = scores[t * clusters + cluster];
    var before = 0.0;
    for (var i = thread; i < clusters; i += THREADS) {
        let score = scores[t * clusters + i];
        before += select(0.0, 1.0, score > own || (score == own && i < cluster));
    }
    let count = workgroup_sum(before, thread);
    if (thread == 0u) {
        nearer = u32(count);
    }
    return workgroupUniformLoad(&nearer) < params.nearest; // all threads go the same way
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let cluster = group.x;
    let t = group.y;
    var mine = Best(LOWEST, NO_ID);
    let size = select(0u, params.size, is_near(t, cluster, groups.x, thread));
    for (var begin = 0u; begin < size; begin += THREADS / LANES) {
        let at = begin + thread / LANES;
        let id = ordering[cluster * params.size + min(at, params.size - 1u)];
        let row = id - params.first_row; // wraps below the first
        var sum = 0.0;
        for (var unit = thread % LANES; unit < params.units; unit += LANES) {
            let weights = decode(min(row, params.rows - 1u), unit);
            for (var i = 0u; i < UNIT_VEC4S; i++) {
                sum += dot(weights[i], y[(t * params.units + unit) * UNIT_VEC4S + i]);
            }
        }
        let logit = lane_sum(sum, thread);
        if (thread % LANES == 0u && at < size && row < params.rows) {
            mine = better(mine, Best(logit, id));
        }
    }
    let best = workgroup_best(mine, thread);
    if (thread == 0u) {
        bests[t * params.stride + params.first + cluster] = best;
    }
}
