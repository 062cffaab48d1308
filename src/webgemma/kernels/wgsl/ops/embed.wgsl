// x[t] = E[ids[t]] * scale: one workgroup for each token; rows outside this part of the table are left alone.
// Of a table that stays on the host, E is the rows of the batch and ids[t] says which of them is t's.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    first_row: u32,
    rows: u32,
    units: u32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> state: State;
@group(0) @binding(3) var<storage, read> ids: array<u32>;
@group(0) @binding(4) var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.x;
    if (t >= state.count) {
        return;
    }
    let row = ids[t] - params.first_row; // wraps below the first
    if (row >= params.rows) {
        return;
    }
    let fours = UNIT / 4u;
    for (var unit = thread; unit < params.units; unit += THREADS) {
        let weights = decode(row, unit);
        for (var i = 0u; i < fours; i++) {
            x[(t * params.units + unit) * fours + i] = params.scale * weights[i];
        }
    }
}
