// out[t, head] = softmax(q k^T) v, every patch seeing every other, with an online softmax. A workgroup
// has a head and QUERIES of its queries, and takes HEAD_DIM keys at a time, so that its threads lie in
// the same way over queries by keys and over queries by dimensions: a thread has four queries, QUADS
// apart, first with eight keys, then with eight dimensions, both ACROSS apart.

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
// Lines are one longer than needed, so that neighbouring lines use other banks.
const LINE: u32 = FOURS + 1u;
const SHARES: u32 = QUADS + 1u;

const_assert ACROSS * EACH == KEYS && ACROSS * QUADS == THREADS;

alias Scores = array<vec4<f32>, EACH>; // of each key, for four queries
alias Gathered = array<array<vec4<f32>, 2>, 4>; // of each query, two fours of dimensions

// What four queries have seen so far.
struct Softmax {
    best: vec4<f32>, // score
    total: vec4<f32>, // of the shares, but only those that this thread has made
}

var<workgroup> queries: array<vec4<f32>, QUERIES * LINE>;
var<workgroup> tile: array<vec4<f32>, KEYS * max(LINE, SHARES)>; // keys, then shares of four queries
var<workgroup> parts: array<vec4<f32>, THREADS>;

// Where a patch's head begins; beyond the last patch comes that one again.
fn head_at(t: u32, head: u32) -> u32 {
    return (min(t, state.count - 1u) * params.heads + head) * FOURS;
}

fn load_queries(first: u32, head: u32, thread: u32) {
    for (var i = thread; i < QUERIES * FOURS; i += THREADS) {
        queries[i / FOURS * LINE + i % FOURS] = q[head_at(first + i / FOURS, head) + i % FOURS];
    }
}

fn load_keys(first: u32, head: u32, thread: u32) {
    for (var i = thread; i < KEYS * FOURS; i += THREADS) {
        tile[i / FOURS * LINE + i % FOURS] = k[head_at(first + i / FOURS, head) + i % FOURS];
    }
}

fn score(scores: ptr<function, Scores>, quad: u32, across: u32) {
    for (var i = 0u; i < FOURS; i++) {
        let a = transpose(mat4x4<f32>( // a column is four queries in one dimension
            queries[quad * LINE + i],
            queries[(quad + QUADS) * LINE + i],
            queries[(quad + 2u * QUADS) * LINE + i],
            queries[(quad + 3u * QUADS) * LINE + i],
        ));
        for (var j = 0u; j < EACH; j++) {
            let key = tile[(across + j * ACROSS) * LINE + i];
            var sum = (*scores)[j];
            sum = fma(a[0], vec4(key.x), sum);
            sum = fma(a[1], vec4(key.y), sum);
            sum = fma(a[2], vec4(key.z), sum);
            (*scores)[j] = fma(a[3], vec4(key.w), sum);
        }
    }
}

// Leaves shares of the best so far in `tile`, and gives how much that one has faded.
fn soften(softmax: ptr<function, Softmax>, scores: Scores, first: u32, thread: u32) -> vec4<f32> {
    let across = thread % ACROSS;
    let quad = thread / ACROSS;
    var seen = scores;
    var top = (*softmax).best;
    for (var j = 0u; j < EACH; j++) {
        if (first + across + j * ACROSS >= state.count) {
            seen[j] = vec4(UNSEEN);
        }
        top = max(top, seen[j]);
    }
    parts[thread] = top;
    workgroupBarrier();
    for (var i = 0u; i < ACROSS; i++) {
        top = max(top, parts[quad * ACROSS + i]);
    }
    let fade = exp((*softmax).best - top);
    var total = (*softmax).total * fade;
    for (var j = 0u; j < EACH; j++) {
        let share = exp(seen[j] - top);
        total += share;
        tile[(across + j * ACROSS) * SHARES + quad] = share;
    }
    *softmax = Softmax(top, total);
    workgroupBarrier();
    return fade;
}

// Adds the tile's values, times their shares.
fn gather(gathered: ptr<function, Gathered>, first: u32, head: u32, quad: u32, across: u32) {
    for (var key = 0u; key < KEYS; key += 4u) {
        var values: array<array<vec4<f32>, 2>, 4>; // read first: eight reads are under way at once
        for (var j = 0u; j < 4u; j++) {
            let at = head_at(first + key + j, head) + across;
            values[j][0] = v[at];
            values[j][1] = v[at + ACROSS];
        }
        for (var j = 0u; j < 4u; j++) {
            let shares = tile[(key + j) * SHARES + quad];
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
    let head = group.x;
    let first_query = group.y * QUERIES;
    if (first_query >= state.count) {
        return;
    }
    let across = thread % ACROSS;
    let quad = thread / ACROSS;
    var softmax = Softmax(vec4(UNSEEN), vec4(0.0));
    var gathered: Gathered;
    load_queries(first_query, head, thread);
    for (var first = 0u; first < state.count; first += KEYS) {
        workgroupBarrier();
        load_keys(first, head, thread);
        workgroupBarrier();
        var scores = Scores(); // naga zeroes a bare `var` only once
        score(&scores, quad, across);
        let fade = soften(&softmax, scores, first, thread);
        for (var c = 0u; c < 4u; c++) {
            gathered[c][0] *= fade[c];
            gathered[c][1] *= fade[c];
        }
        gather(&gathered, first, head, quad, across);
    }
    parts[thread] = softmax.total;
    workgroupBarrier();
    var total = vec4(0.0);
    for (var i = 0u; i < ACROSS; i++) {
        total += parts[quad * ACROSS + i];
    }
    for (var c = 0u; c < 4u; c++) {
        let t = first_query + quad + c * QUADS;
        if (t < state.count) {
            let at = head_at(t, head) + across;
            out[at] = gathered[c][0] / total[c];
            out[at + ACROSS] = gathered[c][1] / total[c];
        }
    }
}
