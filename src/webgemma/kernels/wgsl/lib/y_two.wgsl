// y_row: what is added to the residual, rms(a) * norms[0] + rms(b) * norms[1].

@group(0) @binding(6) var<storage, read> a: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read> norms: array<vec4<f32>>;

fn y_row(at: u32, thread: u32) -> Row {
    var first: Row;
    var second: Row;
    for (var each = 0u; each < EACH; each++) {
        let four = four_of(each, thread);
        first[each] = select(vec4(0.0), a[at + four], is_live(each, thread));
        second[each] = select(vec4(0.0), b[at + four], is_live(each, thread));
    }
    let first_root = inverse_root(first, thread);
    let second_root = inverse_root(second, thread);
    for (var each = 0u; each < EACH; each++) {
        let four = four_of(each, thread);
        first[each] *= first_root * norms[four];
        first[each] += second[each] * second_root * norms[FOURS + four];
    }
    return first;
}
