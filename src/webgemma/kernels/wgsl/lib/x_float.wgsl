// add_products: to each sum its row's product with a unit of x[t], as floats. What is read of x
// serves EACH rows; the op says which they are (row_of).

@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;

const FOURS: u32 = UNIT / 4u;

fn add_products(t: u32, unit: u32, first: u32, sums: ptr<function, array<f32, EACH>>) {
    let at = (t * params.units + unit) * FOURS;
    var values: array<vec4<f32>, FOURS>;
    for (var i = 0u; i < FOURS; i++) {
        values[i] = x[at + i];
    }
    for (var each = 0u; each < EACH; each++) {
        let weights = decode(row_of(first, each), unit);
        for (var i = 0u; i < FOURS; i++) {
            (*sums)[each] += dot(weights[i], values[i]);
        }
    }
}
