// out[n, k] = W[n, k] as a float: one thread for each unit of a row.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    rows: u32,
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;

const UNIT_FOURS: u32 = UNIT / 4u;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let item = (group.y * groups.x + group.x) * THREADS + thread;
    if (item >= params.rows * params.units) {
        return;
    }
    let weights = decode(item / params.units, item % params.units);
    for (var i = 0u; i < UNIT_FOURS; i++) {
        out[item * UNIT_FOURS + i] = weights[i];
    }
}
