// add_row: to each of EACH sums its row's products with x[t], a lane's units of them. Two units at a
// time, so that more of the weights are on their way at once.

fn add_row(t: u32, first: u32, lane: u32, sums: ptr<function, array<f32, EACH>>) {
    var unit = lane;
    for (; unit + LANES < params.units; unit += 2u * LANES) {
        add_products(t, unit, first, sums);
        add_products(t, unit + LANES, first, sums);
    }
    if (unit < params.units) {
        add_products(t, unit, first, sums);
    }
}
