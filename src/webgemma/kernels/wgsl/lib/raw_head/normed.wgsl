// A raw head as attention reads it. inverse_rms: 1 / rms of a head; value_size: the same of a value's head, or 1 in models
// that do not norm values; rotated: two vec4s of a head, HALF apart, normed and rotated; kind 0 is a query, 1 a key.
// uses: raw workgroup_sum rope

struct Params {
    eps: f32,
}

override THREADS: u32;
override HEAD_DIM: u32;
override VALUE_NORM: bool = true;

var<storage, read> norms: array<vec4<f32>>; // q_norm, then k_norm

const VEC4S: u32 = HEAD_DIM / 4u;
const HALF: u32 = VEC4S / 2u;

fn inverse_rms(head: u32, thread: u32) -> f32 {
    var squares = 0.0;
    for (var i = thread; i < VEC4S; i += THREADS) {
        let values = raw_vec4(head * VEC4S + i);
        squares += dot(values, values);
    }
    return inverseSqrt(workgroup_sum(squares, thread) / f32(HEAD_DIM) + params.eps);
}

fn value_size(head: u32, thread: u32) -> f32 {
    if (!VALUE_NORM) {
        return 1.0;
    }
    return inverse_rms(head, thread);
}

fn rotated(head: u32, kind: u32, size: f32, position: u32, i: u32) -> array<vec4<f32>, 2> {
    let a = raw_vec4(head * VEC4S + i) * size * norms[kind * VEC4S + i];
    let b = raw_vec4(head * VEC4S + HALF + i) * size * norms[kind * VEC4S + HALF + i];
    return rotate(a, b, position, i);
}
