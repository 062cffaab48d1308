// out[n, k] = W[n, k] as a float. One thread for each unit of a row.
// uses: format

struct Params {
    rows: u32,
    units: u32,
}

override THREADS: u32 = 64u;

var<storage, read_write> out: array<vec4<f32>>;

const UNIT_VEC4S: u32 = UNIT / 4u;

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
    for (var i = 0u; i < UNIT_VEC4S; i++) {
        out[item * UNIT_VEC4S + i] = weights[i];
    }
}
