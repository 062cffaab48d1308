// y[n] = W[n] x for the rows of a matrix and then for those of a second one, which has another format; of TOKENS tokens.
// The first `groups` workgroups compute the rows of the first: see `rows`. The slot `operand` says where x is, or
// what every workgroup makes it of.
// uses: rows rows@second live=always operand epilogue=none

struct Params {
    rows: u32, // of the first matrix
    groups: u32,
}

override THREADS: u32;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    prepare(group.x, thread);
    if (group.x < params.groups) {
        multiply_rows(0u, 0u, group.x, params.groups, thread);
    } else {
        multiply_rows_second(0u, params.rows, group.x - params.groups, groups.x - params.groups, thread);
    }
}
