// The way back through turn_heads: draw = r (g - x r^2 mean(g x)) for x = raw[t, first + head], with
// r = 1 / sqrt(mean(x^2) + eps), g = w * (dy turned back); TURNED 0: g = dy. One workgroup for each head
// and token.

struct Params {
    heads: u32,
    raw_heads: u32, // heads of a token in `raw` and `draw`
    first_head: u32,
    norm_four: u32, // where w begins in norms
    length: u32, // of a sequence
    eps: f32,
    add: u32, // 1: to what draw holds
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> raw: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> norms: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> turns: array<vec2<u32>>; // turns per position, a 64-bit fraction
@group(0) @binding(4) var<storage, read> dy: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> draw: array<vec4<f32>>;

const FOURS: u32 = HEAD_DIM / 4u;
const HALF: u32 = FOURS / 2u;

// g of the four i of both halves of a head.
fn gradients(at: u32, i: u32, t: u32) -> array<vec4<f32>, 2> {
    let a = dy[at + i];
    let b = dy[at + HALF + i];
    if (TURNED == 0u) {
        return array<vec4<f32>, 2>(a, b);
    }
    let mirrored = rotated(a, -b, t % params.length, i); // backwards is forwards in a mirror
    let w = params.norm_four + i;
    return array<vec4<f32>, 2>(mirrored[0] * norms[w], -mirrored[1] * norms[w + HALF]);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let at = (t * params.raw_heads + params.first_head + group.x) * FOURS;
    let from_at = (t * params.heads + group.x) * FOURS;
    var squares = 0.0;
    var dots = 0.0;
    for (var i = thread; i < HALF; i += THREADS) {
        let g = gradients(from_at, i, t);
        let a = raw[at + i];
        let b = raw[at + HALF + i];
        squares += dot(a, a) + dot(b, b);
        dots += dot(a, g[0]) + dot(b, g[1]);
    }
    let r = inverseSqrt(workgroup_sum(squares, thread) / f32(HEAD_DIM) + params.eps);
    let slope = r * r * workgroup_sum(dots, thread) / f32(HEAD_DIM);
    for (var i = thread; i < HALF; i += THREADS) {
        let g = gradients(from_at, i, t);
        for (var j = 0u; j < 2u; j++) {
            let here = at + j * HALF + i;
            let step = r * (g[j] - slope * raw[here]);
            draw[here] = step + select(vec4(0.0), draw[here], params.add == 1u);
        }
    }
}
