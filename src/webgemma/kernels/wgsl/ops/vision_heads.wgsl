// What attention among patches reads of the raw projections, each clamped to its bounds: q = rope(rms(q) * q_norm),
// k = rope(rms(k) * k_norm), v = rms(v). One workgroup for each patch and head: first the queries', then the
// keys', then the values'. The first half of a head is rotated by the patch's column, the second by its row; values
// that are rotated together are a quarter of the head apart. A thread takes two neighbours at a time.
// uses: batch=tokens workgroup_sum rope clamped pair

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

var<storage, read> raw: array<vec2<f32>>; // of a patch: q, k and v heads
var<storage, read> norms: array<vec2<f32>>; // q_norm, then k_norm
var<storage, read> rotations: array<vec2<u32>>; // revolutions per patch, a 64-bit fraction
var<storage, read_write> q: array<Pair>;
var<storage, read_write> k: array<Pair>;
var<storage, read_write> v: array<Pair>;

const PAIRS: u32 = HEAD_DIM / 2u;
const QUARTER: u32 = PAIRS / 4u; // in pairs

const_assert QUARTER * 8u == HEAD_DIM;

fn bounds(kind: u32) -> vec2<f32> {
    let of_keys = select(vec2(params.k_low, params.k_high), vec2(params.v_low, params.v_high), kind == 2u);
    return select(of_keys, vec2(params.q_low, params.q_high), kind == 0u);
}

fn load(at: u32, bound: vec2<f32>) -> vec2<f32> {
    let values = raw[at];
    return vec2(clamped(values.x, bound.x, bound.y), clamped(values.y, bound.x, bound.y));
}

fn store_head(kind: u32, at: u32, values: vec2<f32>) {
    if (kind == 0u) {
        q[at] = pair_of(values);
    } else if (kind == 1u) {
        k[at] = pair_of(values);
    } else {
        v[at] = pair_of(values);
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let kind = group.x / params.heads;
    let bound = bounds(kind);
    let from_at = (t * 3u * params.heads + group.x) * PAIRS;
    var squares = 0.0;
    for (var i = thread; i < PAIRS; i += THREADS) {
        let values = load(from_at + i, bound);
        squares += dot(values, values);
    }
    let scale = inverseSqrt(workgroup_sum(squares, thread) / f32(HEAD_DIM) + params.eps);
    if (t >= batch.count) {
        return;
    }
    let to = (t * params.heads + group.x % params.heads) * PAIRS;
    for (var item = thread; item < 2u * QUARTER; item += THREADS) {
        let column = item % QUARTER;
        let i = item / QUARTER * 2u * QUARTER + column;
        let a = load(from_at + i, bound) * scale;
        let b = load(from_at + i + QUARTER, bound) * scale;
        if (kind == 2u) {
            store_head(kind, to + i, a);
            store_head(kind, to + i + QUARTER, b);
            continue;
        }
        let position = select(t / params.columns, t % params.columns, item < QUARTER);
        let both = cos_sin(vec4(angle(position, 2u * column), angle(position, 2u * column + 1u), vec2(0u)));
        let first = a * norms[kind * PAIRS + i];
        let second = b * norms[kind * PAIRS + i + QUARTER];
        store_head(kind, to + i, first * both[0].xy - second * both[1].xy);
        store_head(kind, to + i + QUARTER, second * both[0].xy + first * both[1].xy);
    }
}
