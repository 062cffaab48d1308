// added_row: what is added to the residual, rms(a) * norms[0] + rms(b) * norms[1]. The product that a comes from may leave
// its sums over ADDED_SPLITS parts of k, one after the other.
// uses: row norm_weights

override ADDED_SPLITS: u32 = 1u;

var<storage, read> a: array<vec4<f32>>;
var<storage, read> b: array<vec4<f32>>;

fn added_row(at: u32, thread: u32) -> Row {
    let vec4s = arrayLength(&a) / ADDED_SPLITS; // of a split
    var first: Row;
    var second: Row;
    for (var each = 0u; each < SHARE; each++) {
        let column = column_of(each, thread);
        var sum = a[at + column];
        for (var split = 1u; split < ADDED_SPLITS; split++) {
            sum += a[split * vec4s + at + column];
        }
        first[each] = select(vec4(0.0), sum, is_live(each, thread));
        second[each] = select(vec4(0.0), b[at + column], is_live(each, thread));
    }
    let first_root = inverse_root(first, thread);
    let second_root = inverse_root(second, thread);
    for (var each = 0u; each < SHARE; each++) {
        let column = column_of(each, thread);
        first[each] *= first_root * branch_weight(column);
        first[each] += second[each] * second_root * branch_weight(VEC4S + column);
    }
    return first;
}
