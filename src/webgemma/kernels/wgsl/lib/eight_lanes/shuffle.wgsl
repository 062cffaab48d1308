// eight_max, half_sums, four_words: as eight_lanes/memory, by shuffles: the eight are neighbours in one subgroup.

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

fn four_words(word: u32, thread: u32) -> vec4<u32> {
    let second = subgroupShuffleXor(word, 1u);
    let third = subgroupShuffleXor(word, 2u);
    return vec4(word, second, third, subgroupShuffleXor(word, 3u));
}
