// out[t, head] = softmax(q k^T) v, every patch seeing every other, with an online softmax. A workgroup
// has a head and QUERIES of its queries, and takes HEAD_DIM keys at a time, so that its threads lie in
// the same way over queries by keys and over queries by dimensions: a thread has four queries, QUADS
// apart, first with eight keys, then with eight dimensions, both ACROSS apart. Queries and keys pass
// through little memory, SLICE_FOURS fours of dimensions at a time, so that several workgroups find
// room beside each other.

struct Params {
    heads: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> k: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> v: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> out: array<vec4<f32>>;

const UNSEEN: f32 = -1.0e30; // the score of a key that is not there
const FOURS: u32 = HEAD_DIM / 4u;
const KEYS: u32 = HEAD_DIM;
const EACH: u32 = 8u; // keys of a thread
const ACROSS: u32 = KEYS / EACH;
const QUADS: u32 = QUERIES / 4u;
const KEY_QUADS: u32 = KEYS / 4u;
const QUERY_ITEMS: u32 = QUADS * SLICE_FOURS; // threads that bring queries
const KEY_ITEMS: u32 = KEY_QUADS * SLICE_FOURS; // and others that bring keys
const SLICE: u32 = 4u * SLICE_FOURS;
const SLICES: u32 = FOURS / SLICE_FOURS;
// Lines are one longer than needed, so that neighbouring lines use other banks.
const QUERY_LINE: u32 = QUADS + 1u;
const KEY_LINE: u32 = KEY_QUADS + 1u;
const BUFFER: u32 = SLICE * (QUERY_LINE + KEY_LINE);

const_assert ACROSS * EACH == KEYS && ACROSS * QUADS == THREADS && QUADS % 2u == 0u;
const_assert SLICES * SLICE_FOURS == FOURS && QUERY_ITEMS + KEY_ITEMS <= THREADS;

alias Scores = array<vec4<f32>, EACH>; // of each key, for four queries
alias Gathered = array<array<vec4<f32>, 2>, 4>; // of each query, two fours of dimensions

// What four queries have seen so far.
struct Softmax {
    best: vec4<f32>, // score
    total: vec4<f32>, // of the shares, but only those that this thread has made
}

// Where the workgroup's head stands in q, k, v and out.
struct Place {
    first: u32, // of a patch's fours
    step: u32, // from a patch to the next
    last: u32, // patch: beyond it, it comes again
    query: u32, // the workgroup's first
}

// Two buffers of a slice: for each dimension its queries, then its keys, in fours; or for each key its
// shares, in fours of queries.
var<workgroup> tile: array<vec4<f32>, max(2u * BUFFER, KEYS * QUERY_LINE)>;
var<workgroup> parts: array<vec4<f32>, THREADS>;

fn four_at(place: Place, t: u32, four: u32) -> u32 {
    return min(t, place.last) * place.step + place.first + four;
}

// Four dimensions of four queries or keys on their way, while others are multiplied.
fn fetch(place: Place, key: u32, slice: u32, thread: u32) -> mat4x4<f32> {
    let four = slice * SLICE_FOURS + thread % SLICE_FOURS;
    let quad = thread / SLICE_FOURS;
    var ahead: mat4x4<f32>;
    if (thread < QUERY_ITEMS) {
        for (var i = 0u; i < 4u; i++) {
            ahead[i] = q[four_at(place, place.query + quad + i * QUADS, four)];
        }
    } else if (thread < QUERY_ITEMS + KEY_ITEMS) {
        let first = key + (quad - QUADS) / ACROSS * 4u * ACROSS + (quad - QUADS) % ACROSS;
        for (var i = 0u; i < 4u; i++) {
            ahead[i] = k[four_at(place, first + i * ACROSS, four)];
        }
    }
    return ahead;
}

fn stage(ahead: mat4x4<f32>, buffer: u32, thread: u32) {
    let turned = transpose(ahead);
    let dimension = 4u * (thread % SLICE_FOURS);
    let quad = thread / SLICE_FOURS;
    if (thread < QUERY_ITEMS) {
        for (var i = 0u; i < 4u; i++) {
            tile[buffer * BUFFER + (dimension + i) * QUERY_LINE + quad] = turned[i];
        }
    } else if (thread < QUERY_ITEMS + KEY_ITEMS) {
        let first = buffer * BUFFER + SLICE * QUERY_LINE + quad - QUADS;
        for (var i = 0u; i < 4u; i++) {
            tile[first + (dimension + i) * KEY_LINE] = turned[i];
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

// Leaves shares of the best so far in `tile`, and gives how much that one has faded.
fn soften(
    softmax: ptr<function, Softmax>, scores: Scores, left: u32, quad: u32, across: u32,
) -> vec4<f32> {
    var seen = scores;
    var top = (*softmax).best;
    for (var j = 0u; j < EACH; j++) {
        if (across + j * ACROSS >= left) {
            seen[j] = vec4(UNSEEN);
        }
        top = max(top, seen[j]);
    }
    parts[quad * ACROSS + across] = top;
    workgroupBarrier();
    for (var i = 0u; i < ACROSS; i++) {
        top = max(top, parts[quad * ACROSS + i]);
    }
    let fade = exp((*softmax).best - top);
    var total = (*softmax).total * fade;
    for (var j = 0u; j < EACH; j++) {
        let share = exp(seen[j] - top);
        total += share;
        tile[(across + j * ACROSS) * QUERY_LINE + quad] = share;
    }
    *softmax = Softmax(top, total);
    workgroupBarrier();
    return fade;
}

// Adds the values of all keys, times their shares.
fn gather(gathered: ptr<function, Gathered>, place: Place, first: u32, quad: u32, across: u32) {
    for (var key = 0u; key < KEYS; key += 4u) {
        var values: array<array<vec4<f32>, 2>, 4>; // read first: eight reads are under way at once
        for (var j = 0u; j < 4u; j++) {
            let at = four_at(place, first + key + j, across);
            values[j][0] = v[at];
            values[j][1] = v[at + ACROSS];
        }
        for (var j = 0u; j < 4u; j++) {
            let shares = tile[(key + j) * QUERY_LINE + quad];
            for (var c = 0u; c < 4u; c++) {
                for (var i = 0u; i < 2u; i++) {
                    (*gathered)[c][i] = fma(vec4(shares[c]), values[j][i], (*gathered)[c][i]);
                }
            }
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let query = group.y * QUERIES;
    let count = state.count;
    if (query >= count) {
        return;
    }
    let place = Place(group.x * FOURS, params.heads * FOURS, count - 1u, query);
    let across = thread / 2u % ACROSS; // pairs of threads have the same keys
    let quad = thread / (2u * ACROSS) * 2u + thread % 2u;
    var softmax = Softmax(vec4(UNSEEN), vec4(0.0));
    var gathered: Gathered;
    var ahead = fetch(place, 0u, 0u, thread);
    for (var first = 0u; first < count; first += KEYS) {
        workgroupBarrier();
        var scores = Scores(); // naga zeroes a bare `var` only once
        for (var slice = 0u; slice < SLICES; slice++) {
            stage(ahead, slice % 2u, thread);
            workgroupBarrier();
            let next = (slice + 1u) % SLICES;
            ahead = fetch(place, select(first, first + KEYS, next == 0u), next, thread);
            add_slice(&scores, slice % 2u, quad, across);
        }
        let fade = soften(&softmax, scores, count - first, quad, across);
        for (var c = 0u; c < 4u; c++) {
            gathered[c][0] *= fade[c];
            gathered[c][1] *= fade[c];
        }
        gather(&gathered, place, first, quad, across);
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
            let at = four_at(place, t, across);
            out[at] = gathered[c][0] / total[c];
            out[at + ACROSS] = gathered[c][1] / total[c];
        }
    }
}
