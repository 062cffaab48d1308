// What attention among patches reads of the raw projections, each clamped to its bounds: q = rope(rms(q) * q_norm),
// k = rope(rms(k) * k_norm), v = rms(v). One workgroup for each patch and head: first the queries', then the
// keys', then the values'. The first half of a head is rotated by the patch's column, the second by its row; the
// two of a pair are a quarter of the head apart.
// uses: batch=tokens workgroup_sum rope clamped

struct Params {
    heads: u32,
    columns: u32, // patches in a row of the image
    eps: f32,
    q_low: f32,
    q_high: f32,
    k_low: f32,
    k_high: f32,
    v_low: f32,
    v_high: f32,
}

override THREADS: u32;
override HEAD_DIM: u32;

var<storage, read> raw: array<f32>; // of a patch: q, k and v heads
var<storage, read> norms: array<f32>; // q_norm, then k_norm
var<storage, read> rotations: array<vec2<u32>>; // revolutions per patch, a 64-bit fraction
var<storage, read_write> q: array<f32>;
var<storage, read_write> k: array<f32>;
var<storage, read_write> v: array<f32>;

const QUARTER: u32 = HEAD_DIM / 4u;

fn bounds(kind: u32) -> vec2<f32> {
    let of_keys = select(vec2(params.k_low, params.k_high), vec2(params.v_low, params.v_high), kind == 2u);
    return select(of_keys, vec2(params.q_low, params.q_high), kind == 0u);
}

fn store_head(kind: u32, at: u32, value: f32) {
    if (kind == 0u) {
        q[at] = value;
    } else if (kind == 1u) {
        k[at] = value;
    } else {
        v[at] = value;
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let kind = group.x / params.heads;
    let bound = bounds(kind);
    let from_at = (t * 3u * params.heads + group.x) * HEAD_DIM;
    var squares = 0.0;
    for (var i = thread; i < HEAD_DIM; i += THREADS) {
        let value = clamped(raw[from_at + i], bound.x, bound.y);
        squares += value * value;
    }
    let scale = inverseSqrt(workgroup_sum(squares, thread) / f32(HEAD_DIM) + params.eps);
    if (t >= batch.count) {
        return;
    }
    let to = (t * params.heads + group.x % params.heads) * HEAD_DIM;
    for (var pair = thread; pair < 2u * QUARTER; pair += THREADS) {
        let i = pair / QUARTER * 2u * QUARTER + pair % QUARTER; // of the pair's first
        let a = clamped(raw[from_at + i], bound.x, bound.y) * scale;
        let b = clamped(raw[from_at + i + QUARTER], bound.x, bound.y) * scale;
        if (kind == 2u) {
            store_head(kind, to + i, a);
            store_head(kind, to + i + QUARTER, b);
            continue;
        }
        let position = select(t / params.columns, t % params.columns, pair < QUARTER);
        let both = cos_sin(vec4(angle(position, pair % QUARTER), vec3(0u)));
        let first = a * norms[kind * HEAD_DIM + i];
        let second = b * norms[kind * HEAD_DIM + i + QUARTER];
        store_head(kind, to + i, first * both[0].x - second * both[1].x);
        store_head(kind, to + i + QUARTER, second * both[0].x + first * both[1].x);
    }
}
