// raw_vec4: four values of the raw projections of tokens: q, k and (unless k is v) v heads of each. A product may leave
// its sums over RAW_SPLITS parts of k, one after the other.

override RAW_SPLITS: u32 = 1u;

var<storage, read> raw: array<vec4<f32>>;

fn raw_vec4(i: u32) -> vec4<f32> {
    let vec4s = arrayLength(&raw) / RAW_SPLITS; // of a split
    var sum = raw[i];
    for (var split = 1u; split < RAW_SPLITS; split++) {
        sum += raw[split * vec4s + i];
    }
    return sum;
}
