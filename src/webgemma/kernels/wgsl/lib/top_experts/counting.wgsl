// rank: which experts token t is routed to: chosen[slot] are the `used` experts with the largest scores[t], of
// equals the first. share_of: the weight of one, p / (sum of the chosen p) * scale[id] with
// p = softmax(scores[t]). A thread finds an expert's slot by counting those before it.
// uses: token_order

struct Params {
    experts: u32,
    used: u32,
    scale_step: u32, // 0: one scale for all
}

override THREADS: u32;
override MAX_EXPERTS: u32;
override MAX_USED: u32;

var<storage, read> scores: array<f32>;
var<storage, read> scale: array<f32>;

var<workgroup> ordinals: array<vec4<u32>, MAX_EXPERTS / 4u>; // see token_order
var<workgroup> chosen: array<u32, MAX_USED>;

fn rank(t: u32, thread: u32) {
    let vec4s = (params.experts + 3u) / 4u;
    for (var i = thread; i < vec4s; i += THREADS) {
        var values = vec4(0xffffffffu); // after all others
        for (var k = 0u; k < min(4u, params.experts - 4u * i); k++) {
            let bits = bitcast<u32>(scores[t * params.experts + 4u * i + k]);
            let is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
            values[k] = select(ordinal(bits), 0u, is_nan); // it comes first, and spoils all shares
        }
        ordinals[i] = values;
    }
    workgroupBarrier();
    for (var i = thread; i < params.experts; i += THREADS) {
        let own = vec4(ordinals[i / 4u][i % 4u]);
        var before = vec4(0u);
        for (var j = 0u; j < vec4s; j++) {
            let others = ordinals[j];
            let earlier = vec4(4u * j) + vec4(0u, 1u, 2u, 3u) < vec4(i);
            let first = (others < own) | ((others == own) & earlier);
            before += select(vec4(0u), vec4(1u), first);
        }
        let slot = before.x + before.y + before.z + before.w;
        if (slot < params.used) {
            chosen[slot] = i;
        }
    }
    workgroupBarrier();
}

fn share_of(t: u32, slot: u32) -> f32 {
    let at = t * params.experts;
    let best = scores[at + chosen[0]];
    var total = 0.0;
    for (var i = 0u; i < params.used; i++) {
        total += exp(scores[at + chosen[i]] - best);
    }
    let id = chosen[slot];
    return exp(scores[at + id] - best) / total * scale[id * params.scale_step];
}
