// Q3_K: one scale for each sixteen of x, four in a unit.

fn integer_dot(row: u32, unit: u32, x: Slice) -> f32 {
    let block = row * params.row_blocks + unit / 4u;
    let q = quants(block, unit % 4u);
    let dots = vec4(
        dot_sixteen(q[0], x[0]),
        dot_sixteen(q[1], x[1]),
        dot_sixteen(q[2], x[2]),
        dot_sixteen(q[3], x[3]),
    );
    return dot(group_scales(block, unit % 4u), dots);
}
