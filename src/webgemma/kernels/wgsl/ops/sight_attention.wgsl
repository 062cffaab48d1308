// out[t, head] = softmax(q k^T) v, every patch seeing every other, with an online softmax. A workgroup
// has a head and QUERIES of its queries, and takes HEAD_DIM keys at a time. A thread makes the scores of
// four queries, QUADS apart, and eight keys, ACROSS apart; then it gathers four dimensions for eight
// queries, since values come from far and shares do not.

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
const HALF: u32 = QUADS / 2u;
const KEY_QUADS: u32 = KEYS / 4u;
// Lines are one longer than needed, so that neighbouring lines use other banks.
const QUERY_LINE: u32 = QUADS + 1u;
const KEY_LINE: u32 = KEY_QUADS + 1u;
const ITEMS: u32 = (KEY_QUADS * FOURS + THREADS - 1u) / THREADS; // that a thread brings of the keys

const_assert ACROSS * EACH == KEYS && ACROSS * QUADS == THREADS;
const_assert FOURS % 2u == 0u && QUADS % 2u == 0u;

alias Scores = array<vec4<f32>, EACH>; // of each key, for four queries
alias Gathered = array<array<vec4<f32>, 4>, 2>; // of each of eight queries, four dimensions
alias Ahead = array<mat4x4<f32>, ITEMS>; // of each of four keys, a four of dimensions

// What four queries have seen so far.
struct Softmax {
    best: vec4<f32>, // score
    total: vec4<f32>, // of the shares, but only those that this thread has made
}

// In both, four queries, or four keys, stand together, for one dimension after the other.
var<workgroup> queries: array<vec4<f32>, HEAD_DIM * QUERY_LINE>;
var<workgroup> keys: array<vec4<f32>, HEAD_DIM * max(KEY_LINE, QUERY_LINE)>; // then shares of the keys
var<workgroup> parts: array<vec4<f32>, THREADS>;
var<workgroup> fades: array<vec4<f32>, QUADS>; // how much the best so far has faded

// Where the workgroup's head stands in q, k, v and out.
struct Place {
    first: u32, // of a patch's fours
    step: u32, // from a patch to the next
    last: u32, // patch: beyond it, it comes again
}

fn four_at(place: Place, t: u32, four: u32) -> u32 {
    return min(t, place.last) * place.step + place.first + four;
}

// A thread brings four dimensions of four patches and turns them; neighbours have neighbouring fours.
fn load_queries(place: Place, first: u32, thread: u32) {
    for (var item = thread; item < QUADS * FOURS; item += THREADS) {
        let four = item / (2u * QUADS) * 2u + item % 2u;
        let quad = item / 2u % QUADS;
        let t = first + quad;
        let turned = transpose(mat4x4<f32>(
            q[four_at(place, t, four)],
            q[four_at(place, t + QUADS, four)],
            q[four_at(place, t + 2u * QUADS, four)],
            q[four_at(place, t + 3u * QUADS, four)],
        ));
        for (var i = 0u; i < 4u; i++) {
            queries[(4u * four + i) * QUERY_LINE + quad] = turned[i];
        }
    }
}

// Keys on their way, while others are looked at.
fn fetch_keys(place: Place, first: u32, thread: u32) -> Ahead {
    var ahead: Ahead;
    for (var n = 0u; n < ITEMS; n++) {
        let item = thread + n * THREADS;
        let four = item / (2u * KEY_QUADS) * 2u + item % 2u;
        let quad = item / 2u % KEY_QUADS;
        let t = first + quad / ACROSS * 4u * ACROSS + quad % ACROSS;
        if (item < KEY_QUADS * FOURS) {
            for (var i = 0u; i < 4u; i++) {
                ahead[n][i] = k[four_at(place, t + i * ACROSS, four)];
            }
        }
    }
    return ahead;
}

fn stage_keys(ahead: Ahead, thread: u32) {
    for (var n = 0u; n < ITEMS; n++) {
        let item = thread + n * THREADS;
        let four = item / (2u * KEY_QUADS) * 2u + item % 2u;
        let turned = transpose(ahead[n]);
        if (item < KEY_QUADS * FOURS) {
            for (var i = 0u; i < 4u; i++) {
                keys[(4u * four + i) * KEY_LINE + item / 2u % KEY_QUADS] = turned[i];
            }
        }
    }
}

fn score(scores: ptr<function, Scores>, quad: u32, across: u32) {
    for (var i = 0u; i < HEAD_DIM; i++) {
        let a = queries[i * QUERY_LINE + quad];
        for (var j = 0u; j < 2u; j++) {
            let b = keys[i * KEY_LINE + across + j * ACROSS];
            (*scores)[4u * j] = fma(a, vec4(b.x), (*scores)[4u * j]);
            (*scores)[4u * j + 1u] = fma(a, vec4(b.y), (*scores)[4u * j + 1u]);
            (*scores)[4u * j + 2u] = fma(a, vec4(b.z), (*scores)[4u * j + 2u]);
            (*scores)[4u * j + 3u] = fma(a, vec4(b.w), (*scores)[4u * j + 3u]);
        }
    }
}

// Leaves shares of the best so far in `keys`, and in `fades` how much that one has faded.
fn soften(softmax: ptr<function, Softmax>, scores: Scores, left: u32, quad: u32, across: u32) {
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
        keys[(across + j * ACROSS) * QUERY_LINE + quad] = share;
    }
    *softmax = Softmax(top, total);
    if (across == 0u) {
        fades[quad] = fade;
    }
    workgroupBarrier();
}

// Fades what was gathered and adds the values of all keys, times their shares.
fn gather(gathered: ptr<function, Gathered>, place: Place, first: u32, quad: u32, four: u32) {
    for (var c = 0u; c < 4u; c++) {
        (*gathered)[0][c] *= fades[quad][c];
        (*gathered)[1][c] *= fades[quad + HALF][c];
    }
    for (var key = 0u; key < KEYS; key += 4u) {
        var values: array<vec4<f32>, 4>; // read first: four reads are under way at once
        for (var j = 0u; j < 4u; j++) {
            values[j] = v[four_at(place, first + key + j, four)];
        }
        for (var j = 0u; j < 4u; j++) {
            let a = keys[(key + j) * QUERY_LINE + quad];
            let b = keys[(key + j) * QUERY_LINE + quad + HALF];
            for (var c = 0u; c < 4u; c++) {
                (*gathered)[0][c] = fma(vec4(a[c]), values[j], (*gathered)[0][c]);
                (*gathered)[1][c] = fma(vec4(b[c]), values[j], (*gathered)[1][c]);
            }
        }
    }
}

// What the threads of a quad have made of shares.
fn total_of(quad: u32) -> vec4<f32> {
    var total = vec4(0.0);
    for (var i = 0u; i < ACROSS; i++) {
        total += parts[quad * ACROSS + i];
    }
    return total;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first_query = group.y * QUERIES;
    let count = state.count;
    if (first_query >= count) {
        return;
    }
    let place = Place(group.x * FOURS, params.heads * FOURS, count - 1u);
    let across = thread / 2u % ACROSS; // pairs of threads have the same keys
    let quad = thread / (2u * ACROSS) * 2u + thread % 2u;
    var softmax = Softmax(vec4(UNSEEN), vec4(0.0));
    var gathered: Gathered;
    load_queries(place, first_query, thread);
    var ahead = fetch_keys(place, 0u, thread);
    for (var first = 0u; first < count; first += KEYS) {
        workgroupBarrier();
        stage_keys(ahead, thread);
        workgroupBarrier();
        var scores = Scores(); // naga zeroes a bare `var` only once
        score(&scores, quad, across);
        soften(&softmax, scores, count - first, quad, across);
        ahead = fetch_keys(place, first + KEYS, thread);
        gather(&gathered, place, first, thread / FOURS, thread % FOURS);
    }
    parts[quad * ACROSS + across] = softmax.total;
    workgroupBarrier();
    for (var half = 0u; half < 2u; half++) {
        let own = thread / FOURS + half * HALF;
        let total = total_of(own);
        for (var c = 0u; c < 4u; c++) {
            let t = first_query + own + c * QUADS;
            if (t < count) {
                out[four_at(place, t, thread % FOURS)] = gathered[half][c] / total[c];
            }
        }
    }
}
