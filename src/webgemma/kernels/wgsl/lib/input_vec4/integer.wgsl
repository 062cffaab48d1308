// vec4_of: the i-th four values of row t of x, which are integers in the groups of integer_dot.
// uses: integer_width group_place

struct Params {
    vec4s: u32, // of a row of x
}

var<storage, read> x: array<vec4<u32>>;

fn vec4_of(t: u32, i: u32) -> vec4<f32> {
    let group = t * (params.vec4s / 8u) + i / 8u;
    let j = i % 8u;
    var v = unpack4xI8(x[group_place(group, j / 4u)][j % 4u]);
    if (BYTES == 2u) {
        v = 256 * v + unpack4xI8(x[group_place(group, 2u + j / 4u)][j % 4u]);
    }
    return bitcast<f32>(x[group_place(group, 2u * BYTES)].x) * vec4<f32>(v);
}
