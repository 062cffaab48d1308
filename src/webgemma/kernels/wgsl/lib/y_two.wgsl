// y_four: four values of what is added to the residual, rms(a) * norms[0] + rms(b) * norms[1], once
// y_sizes has measured both rows.

@group(0) @binding(6) var<storage, read> a: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read> norms: array<vec4<f32>>;

fn y_sizes(at: u32, thread: u32) -> vec2<f32> {
    var squares = vec2(0.0);
    for (var i = thread; i < params.width / 4u; i += THREADS) {
        squares += vec2(dot(a[at + i], a[at + i]), dot(b[at + i], b[at + i]));
    }
    return vec2(inverse_root(squares.x, thread), inverse_root(squares.y, thread));
}

fn y_four(at: u32, i: u32, sizes: vec2<f32>) -> vec4<f32> {
    return a[at + i] * sizes.x * norms[i] + b[at + i] * sizes.y * norms[params.width / 4u + i];
}
