// Q8_0: one scale for each group of x.

const SCALED: u32 = 32u; // weights with one scale
const OFFSETS: bool = false;

fn integer_unit(row: u32, unit: u32) -> array<Weights, 1> {
    let block = row * params.row_blocks + unit;
    let q = quants(block);
    return array<Weights, 1>(Weights(q[0], q[1], vec4(block_scale(block))));
}
