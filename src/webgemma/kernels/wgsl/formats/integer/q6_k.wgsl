// Q6_K: one scale for each sixteen of x, four in a unit.

const SCALED: u32 = 16u; // weights with one scale
const OFFSETS: bool = false;

fn integer_unit(words: Words) -> array<Weights, 2> {
    let q = quants(words);
    let s = group_scales(words);
    return array<Weights, 2>(
        Weights(q[0], q[1], vec4(s.xy, 0.0, 0.0)),
        Weights(q[2], q[3], vec4(s.zw, 0.0, 0.0)),
    );
}
