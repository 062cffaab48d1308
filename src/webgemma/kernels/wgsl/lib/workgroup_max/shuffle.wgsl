// workgroup_max: the largest of a value over the THREADS threads of a workgroup, returned to all of them.
// Neighbouring threads, which are in one subgroup, shuffle first; one value of each such team goes through workgroup
// memory.
// uses: team

override THREADS: u32;

const MAX_TEAM: u32 = min(TEAM, THREADS);

var<workgroup> max_parts: array<f32, THREADS / MAX_TEAM>;

fn workgroup_max(value: f32, thread: u32) -> f32 {
    var part = value;
    for (var step = MAX_TEAM / 2u; step > 0u; step = step / 2u) {
        part = max(part, subgroupShuffleXor(part, step));
    }
    workgroupBarrier(); // the parts of an earlier maximum have been read
    if (thread % MAX_TEAM == 0u) {
        max_parts[thread / MAX_TEAM] = part;
    }
    workgroupBarrier();
    for (var i = 0u; i < THREADS / MAX_TEAM; i++) {
        part = max(part, max_parts[i]);
    }
    return part;
}
