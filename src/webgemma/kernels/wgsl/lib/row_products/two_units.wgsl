// add_row: to each of EACH sums its row's products with x[t], the units of one lane. Two units at a time, so
// that more of the weights are on their way at once.
// uses: input

struct Params {
    units: u32, // of a row
}

override LANES: u32;
override TEAMS: u32 = 1u;
override EACH: u32;

const STRIDE: u32 = LANES * TEAMS;

fn add_row(t: u32, first: u32, lane: u32, sums: ptr<function, array<f32, EACH>>) {
    var unit = lane;
    for (; unit + STRIDE < params.units; unit += 2u * STRIDE) {
        add_products(t, unit, first, sums);
        add_products(t, unit + STRIDE, first, sums);
    }
    if (unit < params.units) {
        add_products(t, unit, first, sums);
    }
}
