// out[t, head] = rope(rms(raw[t, first + head]) * w), at the position of t in its sequence; TURNED 0:
// only rms. One workgroup for each head and token.

struct Params {
    heads: u32,
    raw_heads: u32, // heads of a token in `raw`
    first_head: u32,
    norm_four: u32, // where w begins in norms
    length: u32, // of a sequence
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> raw: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> norms: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> turns: array<vec2<u32>>; // turns per position, a 64-bit fraction
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;

const FOURS: u32 = HEAD_DIM / 4u;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let from_at = (t * params.raw_heads + params.first_head + group.x) * FOURS;
    let to = (t * params.heads + group.x) * FOURS;
    var squares = 0.0;
    for (var i = thread; i < FOURS; i += THREADS) {
        squares += dot(raw[from_at + i], raw[from_at + i]);
    }
    let r = inverseSqrt(workgroup_sum(squares, thread) / f32(HEAD_DIM) + params.eps);
    let half = FOURS / 2u;
    for (var i = thread; i < half; i += THREADS) {
        var pair = array<vec4<f32>, 2>(raw[from_at + i] * r, raw[from_at + half + i] * r);
        if (TURNED == 1u) {
            let w = params.norm_four + i;
            pair = rotated(pair[0] * norms[w], pair[1] * norms[w + half], t % params.length, i);
        }
        out[to + i] = pair[0];
        out[to + half + i] = pair[1];
    }
}
