// add_row: to each of EACH * TOKENS sums its row's products with x[t] or with a token after it, the units of one lane.
// Weights are decoded once for all TOKENS. Every sum adds up in the order of row_products/two_units: a token's is the
// same as if it were alone.
// uses: input

struct Params {
    units: u32, // of a row
}

override LANES: u32;
override TEAMS: u32 = 1u;
override EACH: u32;
override TOKENS: u32;

fn add_row(t: u32, first: u32, lane: u32, sums: ptr<function, array<f32, EACH * TOKENS>>) {
    for (var unit = lane; unit < params.units; unit += LANES * TEAMS) {
        add_tokens(t, unit, first, sums);
    }
}
