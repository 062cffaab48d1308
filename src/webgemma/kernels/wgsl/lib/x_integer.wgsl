// add_products: to each sum its row's product with a unit of x[t], as integers. What is read of x
// serves EACH rows; the op says which they are (row_of), integer_unit what their weights are.

alias Slice = array<Sixteen, UNIT / 16u>;

fn slice_of(group: u32) -> Slice {
    var slice: Slice;
    for (var i = 0u; i < UNIT / 32u; i++) {
        let at = (group + i) * QUARTERS;
        let low = at + 2u * BYTES - 2u;
        let sizes = bitcast<vec4<f32>>(x[at + QUARTERS - 1u]);
        slice[2u * i] = Sixteen(x[at], x[low], sizes.x, sizes.y);
        slice[2u * i + 1u] = Sixteen(x[at + 1u], x[low + 1u], sizes.x, sizes.z);
    }
    return slice;
}

fn integer_dot(row: u32, unit: u32, x: Slice) -> f32 {
    var w = integer_unit(words_of(row, unit));
    var sum = 0.0;
    for (var i = 0u; i < UNIT / 32u; i++) {
        sum += product(w[i], x[2u * i], x[2u * i + 1u]);
    }
    return sum;
}

fn add_products(t: u32, unit: u32, first: u32, sums: ptr<function, array<f32, EACH>>) {
    let slice = slice_of((t * params.units + unit) * (UNIT / 32u));
    for (var each = 0u; each < EACH; each++) {
        (*sums)[each] += integer_dot(row_of(first, each), unit, slice);
    }
}
