// h[t, head] = the splits of attention_decode put together: see `merged`. One workgroup for each (head, COLUMNS vec4s
// of it, token); its teams of COLUMNS threads share the splits.
// uses: batch=tokens merged store

struct Params {
    heads: u32,
}

override THREADS: u32;
override COLUMNS: u32;

var<storage, read_write> h: array<Stored>;

var<workgroup> team_values: array<vec4<f32>, THREADS>;
var<workgroup> team_totals: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.z * params.heads + group.x;
    let column = group.y * COLUMNS + thread % COLUMNS;
    let own = merged_splits(row, min(column, HEAD_VEC4S - 1u), thread / COLUMNS, THREADS / COLUMNS);
    team_values[thread] = own.values;
    team_totals[thread] = own.total;
    workgroupBarrier();
    var values = vec4(0.0);
    var total = 0.0;
    for (var other = thread % COLUMNS; other < THREADS; other += COLUMNS) {
        values += team_values[other];
        total += team_totals[other];
    }
    let live = thread < COLUMNS && column < HEAD_VEC4S && group.z < batch.count;
    store_vec4(row * HEAD_VEC4S + column, values / total, live, thread);
}
