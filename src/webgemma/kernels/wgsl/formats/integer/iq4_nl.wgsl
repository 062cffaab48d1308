// IQ4_NL: one scale for each group of x.

const SCALED: u32 = 32u; // weights with one scale
const OFFSETS: bool = false;

fn integer_unit(words: Words) -> array<Weights, 1> {
    let q = quants(words);
    return array<Weights, 1>(Weights(q[0], q[1], vec4(block_scale(words))));
}
