// Q2_K: one scale and one offset for each sixteen of x, four in a unit.

const SCALED: u32 = 16u; // weights with one scale
const OFFSETS: bool = true;

fn integer_unit(words: Words) -> array<Weights, 2> {
    let q = quants(words);
    let s = scales_and_offsets(words);
    return array<Weights, 2>(
        Weights(q[0], q[1], vec4(s[0].xy, s[1].xy)),
        Weights(q[2], q[3], vec4(s[0].zw, s[1].zw)),
    );
}
