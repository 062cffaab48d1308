// workgroup_sum: the sum of a value over the THREADS threads of a workgroup, returned to all of them.
// Subgroups of any size add first; one value of each goes through workgroup memory.

override THREADS: u32;

var<workgroup> sum_parts: array<f32, THREADS>;
var<workgroup> sum_count: atomic<u32>;

fn workgroup_sum(value: f32, thread: u32) -> f32 {
    let part = subgroupAdd(value);
    workgroupBarrier(); // the parts of an earlier sum have been read
    if (thread == 0u) {
        atomicStore(&sum_count, 0u);
    }
    workgroupBarrier();
    if (subgroupMin(thread) == thread) {
        sum_parts[atomicAdd(&sum_count, 1u)] = part;
    }
    workgroupBarrier();
    var total = 0.0;
    let count = atomicLoad(&sum_count);
    for (var i = 0u; i < count; i++) {
        total += sum_parts[i];
    }
    return total;
}
