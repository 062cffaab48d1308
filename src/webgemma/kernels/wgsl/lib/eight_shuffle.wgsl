// eight_max and four_sums as in eight.wgsl, by shuffles: the eight are neighbours in one subgroup.

fn eight_max(value: u32, thread: u32) -> u32 {
    var most = value;
    for (var step = 4u; step > 0u; step = step / 2u) {
        most = max(most, subgroupShuffleXor(most, step));
    }
    return most;
}

fn four_sums(value: i32, thread: u32) -> vec2<i32> {
    var own = value;
    for (var step = 2u; step > 0u; step = step / 2u) {
        own += subgroupShuffleXor(own, step);
    }
    let other = subgroupShuffleXor(own, 4u);
    return select(vec2(other, own), vec2(own, other), thread % 8u < 4u);
}
