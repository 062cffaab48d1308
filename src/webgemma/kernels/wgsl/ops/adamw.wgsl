// One step of AdamW, a thread for each weight w, in place: g is shortened so that all gradients
// together are no longer than `longest`; m ← β₁ m + (1 − β₁) g, v ← β₂ v + (1 − β₂) g²,
// w ← w − rate (m̂ / (√v̂ + eps) + decay w), m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ). g is 0 afterwards.

struct Params {
    count: u32,
    slots: u32, // of sums
    beta1: f32,
    beta2: f32,
    eps: f32,
    decay: f32,
    longest: f32,
}

// What changes from step to step.
struct Pace {
    rate: f32,
    left1: f32, // 1 − β₁ᵗ
    left2: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> pace: Pace;
@group(0) @binding(2) var<storage, read> sums: array<f32>; // squares.wgsl's, of all gradients
@group(0) @binding(3) var<storage, read_write> g: array<f32>;
@group(0) @binding(4) var<storage, read_write> w: array<f32>;
@group(0) @binding(5) var<storage, read_write> moments: array<vec2<f32>>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    var squares = 0.0;
    for (var slot = thread; slot < params.slots; slot += THREADS) {
        squares += sums[slot];
    }
    let length = sqrt(workgroup_sum(squares, thread));
    let shorter = select(1.0, params.longest / length, length > params.longest);
    let i = (group.y * groups.x + group.x) * THREADS + thread;
    if (i >= params.count) {
        return;
    }
    let gradient = shorter * g[i];
    g[i] = 0.0;
    let m = mix(gradient, moments[i].x, params.beta1);
    let v = mix(gradient * gradient, moments[i].y, params.beta2);
    moments[i] = vec2(m, v);
    let step = m / pace.left1 / (sqrt(v / pace.left2) + params.eps);
    w[i] -= pace.rate * (step + params.decay * w[i]);
}
