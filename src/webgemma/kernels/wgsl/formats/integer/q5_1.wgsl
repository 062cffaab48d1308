// Q5_1: one scale and one offset for each group of x.

const SCALED: u32 = 32u; // weights with one scale
const OFFSETS: bool = true;

fn integer_unit(words: Words) -> array<Weights, 1> {
    let q = quants(words);
    return array<Weights, 1>(Weights(q[0], q[1], scale_and_offset(words).xxyy));
}
