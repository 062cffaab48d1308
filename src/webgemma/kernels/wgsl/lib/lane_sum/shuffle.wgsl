// lane_sum: as lane_sum/memory, by shuffles: the LANES threads are neighbours in one subgroup.

override LANES: u32;

fn lane_sum(value: f32, thread: u32) -> f32 {
    var sum = value;
    for (var step = LANES / 2u; step > 0u; step = step / 2u) {
        sum += subgroupShuffleXor(sum, step);
    }
    return sum;
}
