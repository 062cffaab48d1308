// softcapped: cap * tanh(logit / cap), or the logit if the cap is 0; bend: that tanh alone, or 0. Far from zero, tanh overflows on some devices; near
// it, its error of 1e-7 would be multiplied by a large cap, and three terms of its series are better.

struct Params {
    cap: f32,
}

fn bend(logit: f32) -> f32 {
    if (params.cap == 0.0) {
        return 0.0;
    }
    let t = clamp(logit / params.cap, -15.0, 15.0);
    if (abs(t) < 0.1) {
        return t * (1.0 - t * t * (1.0 / 3.0 - t * t * (2.0 / 15.0)));
    }
    return tanh(t);
}

fn softcapped(logit: f32) -> f32 {
    if (params.cap == 0.0) {
        return logit;
    }
    return params.cap * bend(logit);
}
