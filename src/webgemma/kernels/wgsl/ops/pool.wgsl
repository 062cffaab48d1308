// h[n] = (root * the mean of POOL x POOL patches - bias) * scale; bias and scale only if STANDARDISED. A thread takes
// four values of a soft token.
// uses: batch=tokens

struct Params {
    width: u32,
    columns: u32, // soft tokens in a row of the image
    root: f32, // of the width
}

override THREADS: u32 = 64u;
override POOL: u32;
override STANDARDISED: bool;

var<storage, read> x: array<vec4<f32>>;
var<storage, read> bias: array<vec4<f32>>;
var<storage, read> scale: array<vec4<f32>>;
var<storage, read_write> h: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let n = group.y;
    let vec4s = params.width / 4u;
    let i = group.x * THREADS + thread;
    if (n >= batch.count || i >= vec4s) {
        return;
    }
    let first = n / params.columns * POOL * params.columns * POOL + n % params.columns * POOL; // patch
    var sum = vec4(0.0);
    for (var row = 0u; row < POOL; row++) {
        for (var column = 0u; column < POOL; column++) {
            sum += x[(first + row * params.columns * POOL + column) * vec4s + i];
        }
    }
    var mean = sum * (params.root / f32(POOL * POOL));
    if (STANDARDISED) {
        mean = (mean - bias[i]) * scale[i];
    }
    h[n * vec4s + i] = mean;
}
