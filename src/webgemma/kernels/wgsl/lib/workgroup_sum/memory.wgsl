// workgroup_sum: the sum of a value over the THREADS threads of a workgroup, returned to all of them.
// Plain WebGPU: halving in workgroup memory.

override THREADS: u32;

var<workgroup> sum_parts: array<f32, THREADS>;

fn workgroup_sum(value: f32, thread: u32) -> f32 {
    workgroupBarrier(); // the parts of an earlier sum have been read
    sum_parts[thread] = value;
    for (var half = THREADS / 2u; half > 0u; half = half / 2u) {
        workgroupBarrier();
        if (thread < half) {
            sum_parts[thread] += sum_parts[thread + half];
        }
    }
    workgroupBarrier();
    return sum_parts[0];
}
