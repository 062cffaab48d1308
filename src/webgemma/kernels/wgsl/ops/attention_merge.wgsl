// h[t, head] = the shares of attention put together: each faded to the common maximum, over the
// common sum. One workgroup for each (head, token). put_float or put_integer stores h.

struct Params {
    heads: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> parts: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> sums: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read_write> h: array<Stored>;

const FOURS: u32 = HEAD_DIM / 4u;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let place = group.y * params.heads + group.x;
    let first = place * SHARES;
    var best = -3.0e38;
    for (var i = 0u; i < SHARES; i++) {
        best = max(best, sums[first + i].x);
    }
    var total = 0.0;
    for (var i = 0u; i < SHARES; i++) {
        total += sums[first + i].y * exp(sums[first + i].x - best);
    }
    for (var begin = 0u; begin < FOURS; begin += THREADS) {
        let four = min(begin + thread, FOURS - 1u);
        var sum = vec4(0.0);
        for (var i = 0u; i < SHARES; i++) {
            sum += parts[(first + i) * FOURS + four] * exp(sums[first + i].x - best);
        }
        let live = begin + thread < FOURS && group.y < state.count;
        put_four(place * FOURS + begin + thread, sum / total, live, thread);
    }
}
