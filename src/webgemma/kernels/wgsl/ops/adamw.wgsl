// AdamW: g is the gradient, scaled down so that the norm of all gradients together is at most max_norm;
// mean = b1 mean + (1 - b1) g, square = b2 square + (1 - b2) g^2,
// w = w - rate (mean / (1 - b1^step) / (sqrt(square / (1 - b2^step)) + eps) + decay w).
// The gradient is reset to zero. Nothing else changes while the norm is not finite. A thread takes one w.
// uses: training_step finite

struct Params {
    count: u32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    decay: f32,
    max_norm: f32,
}

override THREADS: u32;

var<storage, read> norm: array<f32>; // of all gradients together
var<storage, read_write> w: array<f32>;
var<storage, read_write> gradient: array<f32>;
var<storage, read_write> means: array<f32>;
var<storage, read_write> squares: array<f32>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (group.y * groups.x + group.x) * THREADS + thread;
    if (i >= params.count) {
        return;
    }
    let size = norm[0];
    let g = gradient[i] * select(1.0, params.max_norm / size, size > params.max_norm);
    gradient[i] = 0.0;
    if (!is_finite(size)) {
        return;
    }
    let mean = mix(g, means[i], params.beta1);
    let square = mix(g * g, squares[i], params.beta2);
    means[i] = mean;
    squares[i] = square;
    let root = sqrt(square / training_step.square_correction) + params.eps;
    w[i] -= training_step.rate * (mean / training_step.mean_correction / root + params.decay * w[i]);
}
