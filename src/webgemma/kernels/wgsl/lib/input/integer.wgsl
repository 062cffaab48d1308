// add_products: to each of EACH sums its row's product with a unit of x[t], as integers. What is read of x
// serves all EACH rows; the op says which rows they are (row_of), the format what their weights are, `operand`
// where x is. add_tokens: the same for TOKENS tokens from t on, for which what is read of the weights serves.
// uses: integer_dot format operand kept=integer

struct Params {
    units: u32, // of a row of x
}

override EACH: u32;
override TOKENS: u32;
override TOKENS_FIRST: bool = false; // which of them wait in registers for the other: x or the weights

alias Value = vec4<u32>;

alias Unit = array<Sixteen, UNIT / 16u>;

fn unit_of(group: u32) -> Unit {
    var values: Unit;
    for (var i = 0u; i < UNIT / 32u; i++) {
        let own = group + i;
        let low = 2u * BYTES - 2u;
        let sizes = bitcast<vec4<f32>>(x[group_place(own, QUARTERS - 1u)]);
        values[2u * i] = Sixteen(x[group_place(own, 0u)], x[group_place(own, low)], sizes.x, sizes.y);
        values[2u * i + 1u] = Sixteen(
            x[group_place(own, 1u)], x[group_place(own, low + 1u)], sizes.x, sizes.z,
        );
    }
    return values;
}

alias UnitWeights = array<Weights, UNIT / 32u>;

fn integer_dot(weights: UnitWeights, values: Unit) -> f32 {
    var w = weights;
    var sum = 0.0;
    for (var i = 0u; i < UNIT / 32u; i++) {
        sum += integer_product(w[i], values[2u * i], values[2u * i + 1u]);
    }
    return sum;
}

fn add_products(t: u32, unit: u32, first: u32, sums: ptr<function, array<f32, EACH>>) {
    let values = unit_of((t * params.units + unit) * (UNIT / 32u));
    for (var each = 0u; each < EACH; each++) {
        (*sums)[each] += integer_dot(integer_unit(words_of(row_of(first, each), unit)), values);
    }
}

fn add_tokens(t: u32, unit: u32, first: u32, sums: ptr<function, array<f32, EACH * TOKENS>>) {
    if (TOKENS_FIRST) {
        add_rows(t, unit, first, sums);
        return;
    }
    var weights: array<UnitWeights, EACH>;
    for (var each = 0u; each < EACH; each++) {
        weights[each] = integer_unit(words_of(row_of(first, each), unit));
    }
    for (var i = 0u; i < TOKENS; i++) {
        let values = unit_of(((t + i) * params.units + unit) * (UNIT / 32u));
        for (var each = 0u; each < EACH; each++) {
            (*sums)[each * TOKENS + i] += integer_dot(weights[each], values);
        }
    }
}

fn add_rows(t: u32, unit: u32, first: u32, sums: ptr<function, array<f32, EACH * TOKENS>>) {
    var values: array<Unit, TOKENS>;
    for (var i = 0u; i < TOKENS; i++) {
        values[i] = unit_of(((t + i) * params.units + unit) * (UNIT / 32u));
    }
    for (var each = 0u; each < EACH; each++) {
        let weights = integer_unit(words_of(row_of(first, each), unit));
        for (var i = 0u; i < TOKENS; i++) {
            (*sums)[each * TOKENS + i] += integer_dot(weights, values[i]);
        }
    }
}
