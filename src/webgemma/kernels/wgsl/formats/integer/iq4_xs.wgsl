// IQ4_XS: one scale for each group of x.

const SCALED: u32 = 32u; // weights with one scale
const OFFSETS: bool = false;

fn integer_unit(row: u32, unit: u32) -> array<Weights, 1> {
    let block = row * params.row_blocks + unit / 8u;
    let q = quants(block, unit % 8u);
    return array<Weights, 1>(Weights(q[0], q[1], vec4(group_scale(block, unit % 8u))));
}
