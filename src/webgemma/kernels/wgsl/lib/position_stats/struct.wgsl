// What a denoising step computes for each position of a canvas.

struct PositionStats {
    best: u32, // the likeliest token
    sampled: u32, // one drawn from softmax(z), z = logits / temperature
    top: f32, // the best one's logit
    total: f32, // of exp((logit - top) / temperature)
    entropy: f32, // of softmax(z), in nats; below 0 where a logit is not finite
    logprob: f32, // of the best one, before temperature
}

const NOT_FINITE: f32 = -1.0;
