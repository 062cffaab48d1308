// Q4_0: one scale for each group of x.

fn integer_dot(row: u32, unit: u32, x: Slice) -> f32 {
    let block = row * params.row_blocks + unit;
    let q = quants(block);
    return block_scale(block) * dot_group(q[0], q[1], x[0], x[1]);
}
