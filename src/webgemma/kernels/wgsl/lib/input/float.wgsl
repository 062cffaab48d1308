// add_products: to each of EACH sums its row's product with a unit of x[t], as floats. What is read of x
// serves all EACH rows; the op says which rows they are (row_of), `operand` where x is. add_tokens: the same for
// TOKENS tokens from t on, for which what is read of the weights serves.
// uses: format operand kept=float

struct Params {
    units: u32, // of a row of x
}

override EACH: u32;
override TOKENS: u32;

alias Value = vec4<f32>;

const UNIT_VEC4S: u32 = UNIT / 4u;

fn add_products(t: u32, unit: u32, first: u32, sums: ptr<function, array<f32, EACH>>) {
    let at = (t * params.units + unit) * UNIT_VEC4S;
    var values: array<vec4<f32>, UNIT_VEC4S>;
    for (var i = 0u; i < UNIT_VEC4S; i++) {
        values[i] = x[place_of(at + i)];
    }
    for (var each = 0u; each < EACH; each++) {
        let weights = decode(row_of(first, each), unit);
        for (var i = 0u; i < UNIT_VEC4S; i++) {
            (*sums)[each] += dot(weights[i], values[i]);
        }
    }
}

fn add_tokens(t: u32, unit: u32, first: u32, sums: ptr<function, array<f32, EACH * TOKENS>>) {
    for (var each = 0u; each < EACH; each++) {
        let weights = decode(row_of(first, each), unit);
        for (var i = 0u; i < TOKENS; i++) {
            let at = ((t + i) * params.units + unit) * UNIT_VEC4S;
            for (var j = 0u; j < UNIT_VEC4S; j++) {
                (*sums)[each * TOKENS + i] += dot(weights[j], x[place_of(at + j)]);
            }
        }
    }
}
