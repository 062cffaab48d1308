// out[t, head] = rope(rms(raw[t, first + head]) * w), at the position of t in its sequence; if not ROTATED, only rms, and if
// not NORMED, the head as it is. One workgroup for each head and token.
// uses: workgroup_sum rope

struct Params {
    heads: u32,
    raw_heads: u32, // heads of a token in `raw`
    first_head: u32,
    norm_vec4: u32, // where w begins in norms
    length: u32, // of a sequence
    eps: f32,
}

override THREADS: u32;
override HEAD_DIM: u32;
override ROTATED: bool;
override NORMED: bool = true;

var<storage, read> raw: array<vec4<f32>>;
var<storage, read> norms: array<vec4<f32>>;
var<storage, read> rotations: array<vec2<u32>>; // revolutions per position, a 64-bit fraction
var<storage, read_write> out: array<vec4<f32>>;

const VEC4S: u32 = HEAD_DIM / 4u;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let from_at = (t * params.raw_heads + params.first_head + group.x) * VEC4S;
    let to = (t * params.heads + group.x) * VEC4S;
    var squares = 0.0;
    for (var i = thread; i < VEC4S; i += THREADS) {
        squares += dot(raw[from_at + i], raw[from_at + i]);
    }
    let r = select(1.0, inverseSqrt(workgroup_sum(squares, thread) / f32(HEAD_DIM) + params.eps), NORMED);
    let half = VEC4S / 2u;
    for (var i = thread; i < half; i += THREADS) {
        var pair = array<vec4<f32>, 2>(raw[from_at + i] * r, raw[from_at + half + i] * r);
        if (ROTATED) {
            let w = params.norm_vec4 + i;
            pair = rotate(pair[0] * norms[w], pair[1] * norms[w + half], t % params.length, i);
        }
        out[to + i] = pair[0];
        out[to + half + i] = pair[1];
    }
}
