// The backward pass of y[t] = sum over slots of shares[t, slot] * parts[t, slot]: dparts = share * dy[t], and
// dshares = dy[t] . parts. One workgroup for each slot and token.
// uses: workgroup_sum

struct Params {
    width: u32,
    used: u32,
}

override THREADS: u32;

var<storage, read> shares: array<f32>;
var<storage, read> parts: array<vec4<f32>>;
var<storage, read> dy: array<vec4<f32>>;
var<storage, read_write> dparts: array<vec4<f32>>;
var<storage, read_write> dshares: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let vec4s = params.width / 4u;
    let slot = group.y * params.used + group.x;
    let share = shares[slot];
    var dots = 0.0;
    for (var i = thread; i < vec4s; i += THREADS) {
        let gradient = dy[group.y * vec4s + i];
        dots += dot(gradient, parts[slot * vec4s + i]);
        dparts[slot * vec4s + i] = share * gradient;
    }
    let total = workgroup_sum(dots, thread);
    if (thread == 0u) {
        dshares[slot] = total;
    }
}
