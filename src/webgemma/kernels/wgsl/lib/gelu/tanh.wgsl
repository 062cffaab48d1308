// gelu in its tanh form. tanh overflows on some devices far from zero, where gelu is x or 0 anyway.

fn gelu(x: f32) -> f32 {
    let inner = clamp(0.7978845608028654 * (x + 0.044715 * x * x * x), -15.0, 15.0);
    return 0.5 * x * (1.0 + tanh(inner));
}
