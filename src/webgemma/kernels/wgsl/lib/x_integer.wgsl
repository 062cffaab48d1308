// add_products: to each sum its row's product with a unit of x[t], as integers. What is read of x
// serves EACH rows; the op says which they are (row_of), formats/integer/ multiplies.
//
// x = scale * v in groups of 32 values. A group is the v of its first and of its last sixteen: all
// high bytes, then with BYTES 2 all low ones. Then scale, and the sum of x over each sixteen.

@group(0) @binding(3) var<storage, read> x: array<vec4<u32>>;

const QUARTERS: u32 = 2u * BYTES + 1u; // vec4s of a group

struct Sixteen {
    high: vec4<u32>, // all there is, with BYTES 1
    low: vec4<u32>,
    scale: f32,
    sum: f32,
}

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

fn dot_bytes(a: vec4<u32>, b: vec4<u32>) -> i32 {
    return dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y)
        + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w);
}

// q v, exactly: below 2^27.
fn whole_dot(q: vec4<u32>, x: Sixteen) -> i32 {
    let high = dot_bytes(q, x.high);
    if (BYTES == 1u) {
        return high;
    }
    return 256 * high + dot_bytes(q, x.low);
}

// q x, q sixteen signed bytes.
fn dot_sixteen(q: vec4<u32>, x: Sixteen) -> f32 {
    return x.scale * f32(whole_dot(q, x));
}

// q x over both sixteens of a group.
fn dot_group(qa: vec4<u32>, qb: vec4<u32>, a: Sixteen, b: Sixteen) -> f32 {
    return a.scale * f32(whole_dot(qa, a) + whole_dot(qb, b));
}

fn add_products(t: u32, unit: u32, first: u32, sums: ptr<function, array<f32, EACH>>) {
    let slice = slice_of((t * params.units + unit) * (UNIT / 32u));
    for (var each = 0u; each < EACH; each++) {
        (*sums)[each] += integer_dot(row_of(first, each), unit, slice);
    }
}
