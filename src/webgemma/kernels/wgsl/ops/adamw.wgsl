// AdamW: g is the gradient, shrunk so that all gradients together are no longer than `most`;
// mean = b1 mean + (1 - b1) g, square = b2 square + (1 - b2) g^2,
// w = w - rate (mean / (1 - b1^step) / (sqrt(square / (1 - b2^step)) + eps) + decay w).
// The gradient begins again at zero. Nothing changes while the length is not finite. A thread takes one.

struct Params {
    count: u32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    decay: f32,
    most: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> pace: Pace;
@group(0) @binding(2) var<storage, read> length_of: array<f32>;
@group(0) @binding(3) var<storage, read_write> w: array<f32>;
@group(0) @binding(4) var<storage, read_write> gradient: array<f32>;
@group(0) @binding(5) var<storage, read_write> means: array<f32>;
@group(0) @binding(6) var<storage, read_write> squares: array<f32>;

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
    let length = length_of[0];
    let g = gradient[i] * select(1.0, params.most / length, length > params.most);
    gradient[i] = 0.0;
    if (!is_finite(length)) {
        return;
    }
    let mean = mix(g, means[i], params.beta1);
    let square = mix(g * g, squares[i], params.beta2);
    means[i] = mean;
    squares[i] = square;
    let root = sqrt(square / pace.square_left) + params.eps;
    w[i] -= pace.rate * (mean / pace.mean_left / root + params.decay * w[i]);
}
