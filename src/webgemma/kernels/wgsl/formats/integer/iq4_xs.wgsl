// IQ4_XS: one scale for each group of x.

fn integer_dot(row: u32, unit: u32, x: Slice) -> f32 {
    let block = row * params.row_blocks + unit / 8u;
    let q = quants(block, unit % 8u);
    return group_scale(block, unit % 8u) * dot_group(q[0], q[1], x[0], x[1]);
}
