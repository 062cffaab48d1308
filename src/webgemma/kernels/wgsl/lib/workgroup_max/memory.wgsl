// workgroup_max: the largest of a value over the THREADS threads of a workgroup, returned to all of them.

override THREADS: u32;

var<workgroup> max_parts: array<f32, THREADS>;

fn workgroup_max(value: f32, thread: u32) -> f32 {
    workgroupBarrier(); // the parts of an earlier maximum have been read
    max_parts[thread] = value;
    for (var half = THREADS / 2u; half > 0u; half = half / 2u) {
        workgroupBarrier();
        if (thread < half) {
            max_parts[thread] = max(max_parts[thread], max_parts[thread + half]);
        }
    }
    workgroupBarrier();
    return max_parts[0];
}
