// lane_sum: the sum of a value over the LANES neighbouring threads that share a row, returned to the first
// of them. In two steps of about the square root of LANES each.

override THREADS: u32;
override LANES: u32;

const STEP: u32 = select(8u, LANES, LANES < 8u);

var<workgroup> lane_parts: array<f32, THREADS>;

fn lane_sum(value: f32, thread: u32) -> f32 {
    if (LANES == 1u) {
        return value;
    }
    let lane = thread % LANES;
    workgroupBarrier(); // the parts of an earlier sum have been read
    lane_parts[thread] = value;
    workgroupBarrier();
    var sum = 0.0;
    if (lane * STEP < LANES) {
        let at = thread - lane + lane * STEP;
        for (var i = 0u; i < STEP; i++) {
            sum += lane_parts[at + i];
        }
    }
    if (LANES > STEP) {
        workgroupBarrier();
        lane_parts[thread] = sum;
        workgroupBarrier();
        if (lane == 0u) {
            for (var i = 1u; i < LANES / STEP; i++) {
                sum += lane_parts[thread + i];
            }
        }
    }
    return sum;
}
