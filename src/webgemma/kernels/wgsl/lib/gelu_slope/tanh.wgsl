// gelu_and_slope: gelu in its tanh form and its derivative,
// (1 + t) / 2 + x (1 - t^2) u' / 2 for t = tanh(u), u = sqrt(2 / pi) (x + 0.044715 x^3).

fn gelu_and_slope(x: f32) -> vec2<f32> {
    let inner = clamp(0.7978845608028654 * (x + 0.044715 * x * x * x), -15.0, 15.0);
    let t = tanh(inner);
    let inner_slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x);
    return 0.5 * vec2(x * (1.0 + t), 1.0 + t + x * (1.0 - t * t) * inner_slope);
}
