// h[n] = (root * the mean of POOL x POOL patches - bias) * scale: a thread takes four values of a soft
// token. Bias and scale are those of STANDARDISED towers.

struct Params {
    width: u32,
    columns: u32, // soft tokens in a row of the picture
    root: f32, // of the width
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> scale: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> h: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let n = group.y;
    let fours = params.width / 4u;
    let i = group.x * THREADS + thread;
    if (n >= state.count || i >= fours) {
        return;
    }
    let first = n / params.columns * POOL * params.columns * POOL + n % params.columns * POOL; // patch
    var sum = vec4(0.0);
    for (var y = 0u; y < POOL; y++) {
        for (var x_ = 0u; x_ < POOL; x_++) {
            sum += x[(first + y * params.columns * POOL + x_) * fours + i];
        }
    }
    var mean = sum * (params.root / f32(POOL * POOL));
    if (STANDARDISED == 1u) {
        mean = (mean - bias[i]) * scale[i];
    }
    h[n * fours + i] = mean;
}
