// workgroup_best: the highest value over the THREADS threads of a workgroup with its id, the lowest id
// where values are equal.

override THREADS: u32;

const LOWEST: f32 = -3.0e38; // stands for -inf, which WGSL need not keep
const NO_ID: u32 = 0xffffffffu;

struct Best {
    value: f32,
    id: u32,
}

const STRIDE: u32 = 16u; // two short loops instead of many barriers

var<workgroup> best_parts: array<Best, THREADS>;

fn better(a: Best, b: Best) -> Best {
    if (b.value > a.value || (b.value == a.value && b.id < a.id)) {
        return b;
    }
    return a;
}

fn workgroup_best(mine: Best, thread: u32) -> Best {
    workgroupBarrier(); // the parts of an earlier search have been read
    best_parts[thread] = mine;
    workgroupBarrier();
    var best = mine;
    if (thread < STRIDE) {
        for (var i = thread + STRIDE; i < THREADS; i += STRIDE) {
            best = better(best, best_parts[i]);
        }
        best_parts[thread] = best;
    }
    workgroupBarrier();
    best = best_parts[0];
    for (var i = 1u; i < STRIDE; i++) {
        best = better(best, best_parts[i]);
    }
    return best;
}
