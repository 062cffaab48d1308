// x[t] = E[id of t] * scale, the first columns of a row. One workgroup per token; rows outside this part of the table are left alone. Of a
// table that stays on the host, E is the rows of the batch, and the id says which of them is t's.
// uses: token_ids format

struct Params {
    first_row: u32,
    rows: u32,
    units: u32,
    stride: u32, // of a row of x
    scale: f32,
}

override THREADS: u32 = 64u;

var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.x;
    if (t >= batch.count) {
        return;
    }
    let row = id_of(t) - params.first_row; // wraps below the first
    if (row >= params.rows) {
        return;
    }
    let vec4s = UNIT / 4u;
    for (var unit = thread; unit < params.units; unit += THREADS) {
        let weights = decode(row, unit);
        for (var i = 0u; i < vec4s; i++) {
            x[t * params.stride / 4u + unit * vec4s + i] = params.scale * weights[i];
        }
    }
}
