// Q5_K: one scale and one offset for each group of x, two groups in a unit.

const SCALED: u32 = 32u; // weights with one scale
const OFFSETS: bool = true;

fn integer_unit(row: u32, unit: u32) -> array<Weights, 2> {
    let block = row * params.row_blocks + unit / 4u;
    let q = quants(block, unit % 4u);
    let s = scales_and_offsets(block, unit % 4u);
    return array<Weights, 2>(
        Weights(q[0], q[1], s[0].xxyy),
        Weights(q[2], q[3], s[1].xxyy),
    );
}
