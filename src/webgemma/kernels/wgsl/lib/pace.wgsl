// What changes from step to step of training, written by the host.

struct Pace {
    weight: f32, // of a token's loss: one over their number
    seed: u32, // of the dropout
    rate: f32, // of learning
    mean_left: f32, // 1 - beta1^step
    square_left: f32, // 1 - beta2^step
}
