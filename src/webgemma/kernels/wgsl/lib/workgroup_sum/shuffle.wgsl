// workgroup_sum: the sum of a value over the THREADS threads of a workgroup, returned to all of them.
// Each 32 neighbouring threads, which are in one subgroup, shuffle first; one value of each goes through
// workgroup memory.

override THREADS: u32;

const TEAM: u32 = min(32u, THREADS);

var<workgroup> sum_parts: array<f32, THREADS / TEAM>;

fn workgroup_sum(value: f32, thread: u32) -> f32 {
    var part = value;
    for (var step = TEAM / 2u; step > 0u; step = step / 2u) {
        part += subgroupShuffleXor(part, step);
    }
    workgroupBarrier(); // the parts of an earlier sum have been read
    if (thread % TEAM == 0u) {
        sum_parts[thread / TEAM] = part;
    }
    workgroupBarrier();
    var total = 0.0;
    for (var i = 0u; i < THREADS / TEAM; i++) {
        total += sum_parts[i];
    }
    return total;
}
