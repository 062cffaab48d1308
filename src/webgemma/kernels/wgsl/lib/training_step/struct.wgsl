// What changes from step to step of training, written by the host.

struct TrainingStep {
    loss_weight: f32, // of a token: one over the number of supervised tokens
    seed: u32, // of the dropout
    rate: f32, // of learning
    mean_correction: f32, // 1 - beta1^step
    square_correction: f32, // 1 - beta2^step
}

var<storage, read> training_step: TrainingStep;
