// rotate: the pairs (a, b) of a head rotated by their angles at position p. The op declares `rotations`, the
// revolutions per position of each pair as 64-bit fractions.

// The angle of pair j at position p as a fraction of a revolution, reduced exactly: whole revolutions
// overflow out of the fixed-point product.
fn angle(p: u32, j: u32) -> u32 {
    let f = rotations[j];
    return p * f.x + ((p * (f.y >> 18u)) >> 14u);
}

// Cosine and sine of fractions of a revolution; WebGPU's own may be off by 5e-4. Quarters are taken off, and
// the rest, an eighth at most to either side, goes into the first terms of the series.
fn cos_sin(fractions: vec4<u32>) -> array<vec4<f32>, 2> {
    let quarters = (fractions + vec4(0x20000000u)) >> vec4(30u);
    let rest = bitcast<vec4<i32>>(fractions - (quarters << vec4(30u)));
    let x = vec4<f32>(rest) * 1.4629180792671596e-9; // 2 pi / 2^32
    let xx = x * x;
    let c = 1.0 + xx * (-0.5 + xx * (1.0 / 24.0 + xx * (-1.0 / 720.0 + xx * (1.0 / 40320.0))));
    let s = x + x * xx * (-1.0 / 6.0 + xx * (1.0 / 120.0 + xx * (-1.0 / 5040.0 + xx * (1.0 / 362880.0))));
    let odd = (quarters & vec4(1u)) == vec4(1u);
    let signs = 1.0 - vec4<f32>(quarters & vec4(2u));
    return array<vec4<f32>, 2>(signs * select(c, -s, odd), signs * select(s, c, odd));
}

fn rotate(a: vec4<f32>, b: vec4<f32>, p: u32, i: u32) -> array<vec4<f32>, 2> {
    var fractions: vec4<u32>;
    for (var k = 0u; k < 4u; k++) {
        fractions[k] = angle(p, 4u * i + k);
    }
    let both = cos_sin(fractions);
    let c = both[0];
    let s = both[1];
    return array<vec4<f32>, 2>(a * c - b * s, b * c + a * s);
}
