// Q3_K: one scale for each sixteen of x, four in a unit.

const SCALED: u32 = 16u; // weights with one scale
const OFFSETS: bool = false;

fn integer_unit(row: u32, unit: u32) -> array<Weights, 2> {
    let block = row * params.row_blocks + unit / 4u;
    let q = quants(block, unit % 4u);
    let s = group_scales(block, unit % 4u);
    return array<Weights, 2>(
        Weights(q[0], q[1], vec4(s.xy, 0.0, 0.0)),
        Weights(q[2], q[3], vec4(s.zw, 0.0, 0.0)),
    );
}
