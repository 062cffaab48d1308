// A layer with experts forks: sum = (residual + rms(added) * post) * scale, and of it the inputs of its branches,
// n = rms(sum) * next[0] for the dense one and m = rms(sum) * next[1] for the experts, in n's form if ALIKE and
// m_first vec4s from the beginning of h; and the router's scores y = W (rms(sum) * next[2]). Every workgroup makes
// the sum for its rows of W (see `rows`), one of them stores it, one n and one m.
// uses: rows live=always operand=normed_sum store epilogue=none

struct Params {
    m_first: u32,
}

override THREADS: u32;
override ALIKE: bool;
override TOKENS: u32 = 1u;

var<storage, read_write> h: array<Stored>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let weights = next_weights(2u, thread);
    for (var t = 0u; t < TOKENS; t++) {
        let sum = make_sum(t * VEC4S, group.x, thread);
        let root = inverse_root(sum, thread);
        for (var each = 0u; each < SHARE; each++) {
            let live = is_live(each, thread);
            let index = t * VEC4S + each * THREADS + thread;
            let column = column_of(each, thread);
            let normed = sum[each] * root;
            keep(index, normed * weights[each], live, thread);
            if (group.x == min(1u, groups.x - 1u)) {
                store_vec4(index, normed * next_weight(column), live, thread);
            }
            if (group.x == min(2u, groups.x - 1u)) {
                let m = normed * next_weight(VEC4S + column);
                if (ALIKE) {
                    store_vec4(params.m_first + index, m, live, thread);
                } else if (live) {
                    store_floats(params.m_first + index, m);
                }
            }
        }
    }
    workgroupBarrier();
    multiply_rows(0u, 0u, group.x, groups.x, thread);
}
