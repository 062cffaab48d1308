// Q5_K: one scale and one offset for each group of x, two groups in a unit.

fn integer_dot(row: u32, unit: u32, x: Slice) -> f32 {
    let block = row * params.row_blocks + unit / 4u;
    let q = quants(block, unit % 4u);
    let s = scales_and_offsets(block, unit % 4u);
    return s[0].x * dot_group(q[0], q[1], x[0], x[1]) + s[0].y * (x[0].sum + x[1].sum)
        + s[1].x * dot_group(q[2], q[3], x[2], x[3]) + s[1].y * (x[2].sum + x[3].sum);
}
