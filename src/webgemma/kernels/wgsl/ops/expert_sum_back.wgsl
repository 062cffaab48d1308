// The way back through y[t] = sum over slots of shares[t, slot] * parts[t, slot]: dparts = share * dy[t],
// and dshares = dy[t] . parts. One workgroup for each slot and token.

struct Params {
    width: u32,
    used: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> shares: array<f32>;
@group(0) @binding(2) var<storage, read> parts: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> dy: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> dparts: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> dshares: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let fours = params.width / 4u;
    let place = group.y * params.used + group.x;
    let share = shares[place];
    var dots = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        let step = dy[group.y * fours + i];
        dots += dot(step, parts[place * fours + i]);
        dparts[place * fours + i] = share * step;
    }
    let total = workgroup_sum(dots, thread);
    if (thread == 0u) {
        dshares[place] = total;
    }
}
