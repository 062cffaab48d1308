// Q5_1: one scale and one offset for each group of x.

fn integer_dot(row: u32, unit: u32, x: Slice) -> f32 {
    let block = row * params.row_blocks + unit;
    let q = quants(block);
    let s = scale_and_offset(block);
    return s.x * dot_group(q[0], q[1], x[0], x[1]) + s.y * (x[0].sum + x[1].sum);
}
