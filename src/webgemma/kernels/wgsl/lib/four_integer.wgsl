// four_of: the i-th four values of row t of x, which are integers in the groups of integer.wgsl.

@group(0) @binding(3) var<storage, read> x: array<vec4<u32>>;

fn four_of(t: u32, i: u32) -> vec4<f32> {
    let at = (t * (params.fours / 8u) + i / 8u) * (2u * BYTES + 1u);
    let place = i % 8u;
    var v = unpack4xI8(x[at + place / 4u][place % 4u]);
    if (BYTES == 2u) {
        v = 256 * v + unpack4xI8(x[at + 2u + place / 4u][place % 4u]);
    }
    return bitcast<f32>(x[at + 2u * BYTES].x) * vec4<f32>(v);
}
