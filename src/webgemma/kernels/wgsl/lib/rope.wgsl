// rotated: the pairs (a, b) of a head turned by their angles at position p; the op declares `turns`, the
// turns per position of each pair as 64-bit fractions.

// The angle of position p for pair j, reduced exactly: the whole turns fall off the fixed-point product.
fn angle(p: u32, j: u32) -> f32 {
    let f = turns[j];
    let fraction = p * f.x + ((p * (f.y >> 18u)) >> 14u);
    return f32(bitcast<i32>(fraction)) * 1.4629180792671596e-9; // 2 pi / 2^32
}

fn rotated(a: vec4<f32>, b: vec4<f32>, p: u32, four: u32) -> array<vec4<f32>, 2> {
    var angles: vec4<f32>;
    for (var i = 0u; i < 4u; i++) {
        angles[i] = angle(p, 4u * four + i);
    }
    let c = cos(angles);
    let s = sin(angles);
    return array<vec4<f32>, 2>(a * c - b * s, b * c + a * s);
}
