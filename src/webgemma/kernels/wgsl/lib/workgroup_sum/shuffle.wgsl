// workgroup_sum: the sum of a value over the THREADS threads of a workgroup, returned to all of them.
// Neighbouring threads, which are in one subgroup, shuffle first; one value of each such team goes through workgroup
// memory. They are added in the order of the teams, so that equal values have equal sums.
// uses: team

override THREADS: u32;

const SUM_TEAM: u32 = min(TEAM, THREADS);

var<workgroup> sum_parts: array<f32, THREADS / SUM_TEAM>;

fn workgroup_sum(value: f32, thread: u32) -> f32 {
    var part = value;
    for (var step = SUM_TEAM / 2u; step > 0u; step = step / 2u) {
        part += subgroupShuffleXor(part, step);
    }
    workgroupBarrier(); // the parts of an earlier sum have been read
    if (thread % SUM_TEAM == 0u) {
        sum_parts[thread / SUM_TEAM] = part;
    }
    workgroupBarrier();
    var total = 0.0;
    for (var i = 0u; i < THREADS / SUM_TEAM; i++) {
        total += sum_parts[i];
    }
    return total;
}
