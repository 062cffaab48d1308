// eight_max, half_sums: as eight_lanes/memory, by shuffles: the eight are neighbours in one subgroup.

fn eight_max(value: u32, thread: u32) -> u32 {
    var largest = value;
    for (var step = 4u; step > 0u; step = step / 2u) {
        largest = max(largest, subgroupShuffleXor(largest, step));
    }
    return largest;
}

fn half_sums(value: i32, thread: u32) -> vec2<i32> {
    var half = value;
    for (var step = 2u; step > 0u; step = step / 2u) {
        half += subgroupShuffleXor(half, step);
    }
    let other = subgroupShuffleXor(half, 4u);
    return select(vec2(other, half), vec2(half, other), thread % 8u < 4u);
}
