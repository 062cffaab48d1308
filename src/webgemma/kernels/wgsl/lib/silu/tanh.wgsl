// sigmoid and silu, by a tanh that overflows on some devices far from zero, where sigmoid is 0 or 1.
// uses: clamped

fn sigmoid(x: vec4<f32>) -> vec4<f32> {
    return select(0.5 + 0.5 * tanh(clamp(0.5 * x, vec4(-15.0), vec4(15.0))), x, is_nan4(x));
}

fn silu(x: vec4<f32>) -> vec4<f32> {
    return x * sigmoid(x);
}
