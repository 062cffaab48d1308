// The backward pass of rope_heads: draw = r (g - x r^2 mean(g x)) for x = raw[t, first + head], with
// r = 1 / sqrt(mean(x^2) + eps), g = w * (dy rotated back); if not ROTATED, g = dy; if not NORMED, draw = dy. One
// workgroup for each head and token.
// uses: workgroup_sum rope

struct Params {
    heads: u32,
    raw_heads: u32, // heads of a token in `raw` and `draw`
    first_head: u32,
    norm_vec4: u32, // where w begins in norms
    length: u32, // of a sequence
    eps: f32,
    add: u32, // 1: to what draw holds
}

override THREADS: u32;
override HEAD_DIM: u32;
override ROTATED: bool;
override NORMED: bool = true;

var<storage, read> raw: array<vec4<f32>>;
var<storage, read> norms: array<vec4<f32>>;
var<storage, read> rotations: array<vec2<u32>>; // revolutions per position, a 64-bit fraction
var<storage, read> dy: array<vec4<f32>>;
var<storage, read_write> draw: array<vec4<f32>>;

const VEC4S: u32 = HEAD_DIM / 4u;
const HALF: u32 = VEC4S / 2u;

// g of the vec4 i of both halves of a head.
fn gradients(at: u32, i: u32, t: u32) -> array<vec4<f32>, 2> {
    let a = dy[at + i];
    let b = dy[at + HALF + i];
    if (!ROTATED) {
        return array<vec4<f32>, 2>(a, b);
    }
    let mirrored = rotate(a, -b, t % params.length, i); // rotating back is rotating the mirror image
    let w = params.norm_vec4 + i;
    return array<vec4<f32>, 2>(mirrored[0] * norms[w], -mirrored[1] * norms[w + HALF]);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let at = (t * params.raw_heads + params.first_head + group.x) * VEC4S;
    let from_at = (t * params.heads + group.x) * VEC4S;
    var squares = 0.0;
    var dots = 0.0;
    for (var i = thread; i < HALF; i += THREADS) {
        let g = gradients(from_at, i, t);
        let a = raw[at + i];
        let b = raw[at + HALF + i];
        squares += dot(a, a) + dot(b, b);
        dots += dot(a, g[0]) + dot(b, g[1]);
    }
    let r = select(1.0, inverseSqrt(workgroup_sum(squares, thread) / f32(HEAD_DIM) + params.eps), NORMED);
    let slope = select(0.0, r * r * workgroup_sum(dots, thread) / f32(HEAD_DIM), NORMED);
    for (var i = thread; i < HALF; i += THREADS) {
        let g = gradients(from_at, i, t);
        for (var j = 0u; j < 2u; j++) {
            let here = at + j * HALF + i;
            let gradient = r * (g[j] - slope * raw[here]);
            draw[here] = gradient + select(vec4(0.0), draw[here], params.add == 1u);
        }
    }
}
