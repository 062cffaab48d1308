// Q5_K: one scale and one offset for each group of x, two groups in a unit.

const SCALED: u32 = 32u; // weights with one scale
const OFFSETS: bool = true;

fn integer_unit(words: Words) -> array<Weights, 2> {
    let q = quants(words);
    let s = scales_and_offsets(words);
    return array<Weights, 2>(
        Weights(q[0], q[1], s[0].xxyy),
        Weights(q[2], q[3], s[1].xxyy),
    );
}
