// For each row n: the sum over k of W[n, k] x[t, k], handed to finish(t, n, sum), TOKENS tokens t at a time: see `rows`.
// The slot `operand` says where x is, or what every workgroup makes it of.
// uses: rows operand

override THREADS: u32;
override TOKENS: u32 = 1u;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = group.y * groups.x + group.x;
    prepare(index, thread);
    multiply_rows(group.z * TOKENS, 0u, index, groups.x * groups.y, thread);
}
