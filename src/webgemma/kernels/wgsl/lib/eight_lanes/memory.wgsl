// eight_max: the largest value among eight neighbouring threads. half_sums: the sums over the first four
// and over the last four of them. four_words: the words of four neighbours in order, for the first of them. All
// threads of a workgroup call these together.

override THREADS: u32;

var<workgroup> eight_values: array<u32, THREADS>;
var<workgroup> eight_counts: array<i32, THREADS>;

fn eight_max(value: u32, thread: u32) -> u32 {
    workgroupBarrier(); // the values of an earlier call have been read
    eight_values[thread] = value;
    workgroupBarrier();
    let first = thread - thread % 8u;
    var largest = value;
    for (var i = 0u; i < 8u; i++) {
        largest = max(largest, eight_values[first + i]);
    }
    return largest;
}

fn half_sums(value: i32, thread: u32) -> vec2<i32> {
    workgroupBarrier();
    eight_counts[thread] = value;
    workgroupBarrier();
    let first = thread - thread % 8u;
    var sums = vec2(0);
    for (var i = 0u; i < 4u; i++) {
        sums += vec2(eight_counts[first + i], eight_counts[first + 4u + i]);
    }
    return sums;
}

fn four_words(word: u32, thread: u32) -> vec4<u32> {
    workgroupBarrier();
    eight_values[thread] = word;
    workgroupBarrier();
    let first = thread - thread % 4u;
    return vec4(eight_values[first], eight_values[first + 1u], eight_values[first + 2u], eight_values[first + 3u]);
}
