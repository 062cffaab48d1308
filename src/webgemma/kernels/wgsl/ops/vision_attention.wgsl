// out[t, head] = softmax(q k^T) v, every patch attending to every other, with an online softmax. A workgroup has a
// head and QUERIES of its queries, and takes HEAD_DIM keys at a time, so that its threads cover queries by keys
// and queries by dimensions in the same way: a thread has four queries, QUADS apart, first with eight keys, then
// with eight dimensions, both ACROSS apart. Queries and keys go through little workgroup memory, SLICE_VEC4S
// vec4s of dimensions at a time, so that several workgroups run beside each other.
// uses: batch=tokens

struct Params {
    heads: u32,
}

override THREADS: u32;
override HEAD_DIM: u32;
override QUERIES: u32;
override SLICE_VEC4S: u32;

var<storage, read> q: array<vec4<f32>>;
var<storage, read> k: array<vec4<f32>>;
var<storage, read> v: array<vec4<f32>>;
var<storage, read_write> out: array<vec4<f32>>;

const MASKED: f32 = -3.0e38; // the score of a key beyond the last
const VEC4S: u32 = HEAD_DIM / 4u;
const KEYS: u32 = HEAD_DIM;
const EACH: u32 = 8u; // keys of a thread
const ACROSS: u32 = KEYS / EACH;
const QUADS: u32 = QUERIES / 4u;
const KEY_QUADS: u32 = KEYS / 4u;
const QUERY_ITEMS: u32 = QUADS * SLICE_VEC4S; // threads that fetch queries
const KEY_ITEMS: u32 = KEY_QUADS * SLICE_VEC4S; // and others that fetch keys
const SLICE: u32 = 4u * SLICE_VEC4S;
const SLICES: u32 = VEC4S / SLICE_VEC4S;
// Lines are one longer than needed, so that neighbouring lines use other banks.
const QUERY_LINE: u32 = QUADS + 1u;
const KEY_LINE: u32 = KEY_QUADS + 1u;
const BUFFER: u32 = SLICE * (QUERY_LINE + KEY_LINE);

const_assert ACROSS * EACH == KEYS && ACROSS * QUADS == THREADS && QUADS % 2u == 0u;
const_assert SLICES * SLICE_VEC4S == VEC4S && QUERY_ITEMS + KEY_ITEMS <= THREADS;

alias Scores = array<vec4<f32>, EACH>; // of each key, for four queries
alias Values = array<array<vec4<f32>, 2>, 4>; // of each query, two vec4s of dimensions

// The softmax of four queries so far.
struct Softmax {
    best: vec4<f32>, // score
    total: vec4<f32>, // of the weights, but only those that this thread has computed
}

// Where the workgroup's head is in q, k, v and out.
struct Head {
    first: u32, // of a patch's vec4s
    step: u32, // from a patch to the next
    last: u32, // patch: beyond it, that one is read again
    query: u32, // the workgroup's first
}

// Two buffers of a slice: for each dimension its queries, then its keys, in vec4s; or for each key its weights,
// in vec4s of queries.
var<workgroup> tile: array<vec4<f32>, max(2u * BUFFER, KEYS * QUERY_LINE)>;
var<workgroup> parts: array<vec4<f32>, THREADS>;

fn vec4_at(head: Head, t: u32, i: u32) -> u32 {
    return min(t, head.last) * head.step + head.first + i;
}

// Four dimensions of four queries or keys on their way, while others are multiplied.
fn fetch(head: Head, key: u32, slice: u32, thread: u32) -> mat4x4<f32> {
    let column = slice * SLICE_VEC4S + thread % SLICE_VEC4S;
    let quad = thread / SLICE_VEC4S;
    var ahead: mat4x4<f32>;
    if (thread < QUERY_ITEMS) {
        for (var i = 0u; i < 4u; i++) {
            ahead[i] = q[vec4_at(head, head.query + quad + i * QUADS, column)];
        }
    } else if (thread < QUERY_ITEMS + KEY_ITEMS) {
        let first = key + (quad - QUADS) / ACROSS * 4u * ACROSS + (quad - QUADS) % ACROSS;
        for (var i = 0u; i < 4u; i++) {
            ahead[i] = k[vec4_at(head, first + i * ACROSS, column)];
        }
    }
    return ahead;
}

fn stage(ahead: mat4x4<f32>, buffer: u32, thread: u32) {
    let columns = transpose(ahead);
    let dimension = 4u * (thread % SLICE_VEC4S);
    let quad = thread / SLICE_VEC4S;
    if (thread < QUERY_ITEMS) {
        for (var i = 0u; i < 4u; i++) {
            tile[buffer * BUFFER + (dimension + i) * QUERY_LINE + quad] = columns[i];
        }
    } else if (thread < QUERY_ITEMS + KEY_ITEMS) {
        let first = buffer * BUFFER + SLICE * QUERY_LINE + quad - QUADS;
        for (var i = 0u; i < 4u; i++) {
            tile[first + (dimension + i) * KEY_LINE] = columns[i];
        }
    }
}

fn add_slice(scores: ptr<function, Scores>, buffer: u32, quad: u32, across: u32) {
    for (var i = 0u; i < SLICE; i++) {
        let a = tile[buffer * BUFFER + i * QUERY_LINE + quad];
        for (var j = 0u; j < 2u; j++) {
            let at = buffer * BUFFER + SLICE * QUERY_LINE + i * KEY_LINE + across + j * ACROSS;
            let b = tile[at];
            (*scores)[4u * j] = fma(a, vec4(b.x), (*scores)[4u * j]);
            (*scores)[4u * j + 1u] = fma(a, vec4(b.y), (*scores)[4u * j + 1u]);
            (*scores)[4u * j + 2u] = fma(a, vec4(b.z), (*scores)[4u * j + 2u]);
            (*scores)[4u * j + 3u] = fma(a, vec4(b.w), (*scores)[4u * j + 3u]);
        }
    }
}

// Leaves weights relative to the best so far in `tile`, and returns the factor for what was accumulated before.
fn soften(
    softmax: ptr<function, Softmax>, scores: Scores, remaining: u32, quad: u32, across: u32,
) -> vec4<f32> {
    var masked = scores;
    var top = (*softmax).best;
    for (var j = 0u; j < EACH; j++) {
        if (across + j * ACROSS >= remaining) {
            masked[j] = vec4(MASKED);
        }
        top = max(top, masked[j]);
    }
    parts[quad * ACROSS + across] = top;
    workgroupBarrier();
    for (var i = 0u; i < ACROSS; i++) {
        top = max(top, parts[quad * ACROSS + i]);
    }
    let fade = exp((*softmax).best - top);
    var total = (*softmax).total * fade;
    for (var j = 0u; j < EACH; j++) {
        let weight = exp(masked[j] - top);
        total += weight;
        tile[(across + j * ACROSS) * QUERY_LINE + quad] = weight;
    }
    *softmax = Softmax(top, total);
    workgroupBarrier();
    return fade;
}

// Adds the values of all keys, times their weights.
fn accumulate(values: ptr<function, Values>, head: Head, first: u32, quad: u32, across: u32) {
    for (var key = 0u; key < KEYS; key += 4u) {
        var four_keys: array<array<vec4<f32>, 2>, 4>; // read first: eight reads are under way at once
        for (var j = 0u; j < 4u; j++) {
            let at = vec4_at(head, first + key + j, across);
            four_keys[j][0] = v[at];
            four_keys[j][1] = v[at + ACROSS];
        }
        for (var j = 0u; j < 4u; j++) {
            let weights = tile[(key + j) * QUERY_LINE + quad];
            for (var c = 0u; c < 4u; c++) {
                for (var i = 0u; i < 2u; i++) {
                    (*values)[c][i] = fma(vec4(weights[c]), four_keys[j][i], (*values)[c][i]);
                }
            }
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let query = group.y * QUERIES;
    let count = batch.count;
    if (query >= count) {
        return;
    }
    let head = Head(group.x * VEC4S, params.heads * VEC4S, count - 1u, query);
    let across = thread / 2u % ACROSS; // pairs of threads have the same keys
    let quad = thread / (2u * ACROSS) * 2u + thread % 2u;
    var softmax = Softmax(vec4(MASKED), vec4(0.0));
    var values: Values;
    var ahead = fetch(head, 0u, 0u, thread);
    for (var first = 0u; first < count; first += KEYS) {
        workgroupBarrier();
        var scores = Scores(); // naga zeroes a bare `var` only once
        for (var slice = 0u; slice < SLICES; slice++) {
            stage(ahead, slice % 2u, thread);
            workgroupBarrier();
            let next = (slice + 1u) % SLICES;
            ahead = fetch(head, select(first, first + KEYS, next == 0u), next, thread);
            add_slice(&scores, slice % 2u, quad, across);
        }
        let fade = soften(&softmax, scores, count - first, quad, across);
        for (var c = 0u; c < 4u; c++) {
            values[c][0] *= fade[c];
            values[c][1] *= fade[c];
        }
        accumulate(&values, head, first, quad, across);
    }
    parts[quad * ACROSS + across] = softmax.total;
    workgroupBarrier();
    var total = vec4(0.0);
    for (var i = 0u; i < ACROSS; i++) {
        total += parts[quad * ACROSS + i];
    }
    for (var c = 0u; c < 4u; c++) {
        let t = query + quad + c * QUADS;
        if (t < count) {
            let at = vec4_at(head, t, across);
            out[at] = values[c][0] / total[c];
            out[at + ACROSS] = values[c][1] / total[c];
        }
    }
}
