// with_token: the mean of the context's part and the token's own, times sqrt(2): their variances add up.

var<storage, read> token: array<f32>;

fn with_token(context: f32, at: u32) -> f32 {
    return (context + token[at]) * 0.7071067811865476;
}
