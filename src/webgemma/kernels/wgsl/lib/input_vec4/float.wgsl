// vec4_of: the i-th four values of row t of x, which are floats.

struct Params {
    vec4s: u32, // of a row of x
}

var<storage, read> x: array<vec4<f32>>;

fn vec4_of(t: u32, i: u32) -> vec4<f32> {
    return x[t * params.vec4s + i];
}
