// h[t, head] = the splits of attention_decode put together: each scaled to the common maximum, over the common sum.
// One workgroup for each (head, COLUMNS vec4s of it, token); its teams of COLUMNS threads share the splits.
// uses: batch=tokens store

struct Params {
    heads: u32,
}

override THREADS: u32;
override HEAD_DIM: u32;
override SPLITS: u32;
override COLUMNS: u32;

var<storage, read> parts: array<vec4<f32>>; // [head, split, HEAD_VEC4S]
var<storage, read> sums: array<vec2<f32>>; // [head, split]: maximum, sum
var<storage, read_write> h: array<Stored>;

const HEAD_VEC4S: u32 = HEAD_DIM / 4u;
const TEAMS: u32 = THREADS / COLUMNS;

var<workgroup> team_values: array<vec4<f32>, THREADS>;
var<workgroup> team_totals: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.z * params.heads + group.x;
    let column = group.y * COLUMNS + thread % COLUMNS;
    let first = row * SPLITS;
    var best = -3.0e38;
    for (var i = 0u; i < SPLITS; i++) {
        best = max(best, sums[first + i].x);
    }
    var total = 0.0;
    var values = vec4(0.0);
    for (var i = thread / COLUMNS; i < SPLITS; i += TEAMS) {
        let weight = exp(sums[first + i].x - best);
        total += sums[first + i].y * weight;
        values += parts[(first + i) * HEAD_VEC4S + min(column, HEAD_VEC4S - 1u)] * weight;
    }
    team_values[thread] = values;
    team_totals[thread] = total;
    workgroupBarrier();
    total = 0.0;
    values = vec4(0.0);
    for (var other = thread % COLUMNS; other < THREADS; other += COLUMNS) {
        total += team_totals[other];
        values += team_values[other];
    }
    let live = thread < COLUMNS && column < HEAD_VEC4S && group.z < batch.count;
    store_vec4(row * HEAD_VEC4S + column, values / total, live, thread);
}
