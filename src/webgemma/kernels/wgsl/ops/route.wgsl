// Which experts a token asks, and how much each counts: ids[t] are the `used` experts with the largest
// p = softmax(scores[t]), of equals the first; shares[t, slot] = p / (sum of the chosen p) * scale[id].
// One workgroup for each token; a thread finds an expert's place by counting those before it.

struct Params {
    experts: u32,
    used: u32,
    scale_step: u32, // 0: one scale for all
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> scores: array<f32>;
@group(0) @binding(3) var<storage, read> scale: array<f32>;
@group(0) @binding(4) var<storage, read_write> ids: array<u32>;
@group(0) @binding(5) var<storage, read_write> shares: array<f32>;

var<workgroup> odds: array<f32, MOST_EXPERTS>; // p times a common factor, which the shares lose again
var<workgroup> chosen: array<u32, MOST_USED>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.x;
    if (t >= state.count) {
        return;
    }
    let at = t * params.experts;
    var best = scores[at];
    for (var i = 1u; i < params.experts; i++) {
        best = max(best, scores[at + i]);
    }
    for (var i = thread; i < params.experts; i += THREADS) {
        odds[i] = exp(scores[at + i] - best);
    }
    workgroupBarrier();
    for (var i = thread; i < params.experts; i += THREADS) {
        // As bits, floats from 0 on keep their order, and NaN has a place too: every slot is filled.
        let own = bitcast<u32>(odds[i]);
        var place = 0u;
        for (var j = 0u; j < params.experts; j++) {
            let other = bitcast<u32>(odds[j]);
            place += u32(other > own || (other == own && j < i));
        }
        if (place < params.used) {
            chosen[place] = i;
        }
    }
    workgroupBarrier();
    var total = 0.0;
    for (var slot = 0u; slot < params.used; slot++) {
        total += odds[chosen[slot]];
    }
    if (thread < params.used) {
        let id = chosen[thread];
        ids[t * params.used + thread] = id;
        shares[t * params.used + thread] = odds[id] / total * scale[id * params.scale_step];
    }
}
