// out[t, head] = softmax(q k^T) v over the positions that t attends to, for many tokens, on the GPU's matrix units,
// with an online softmax. One workgroup for each key-value head and QUERIES of its queries (the heads of one token
// after those of another). Queries, keys and values go through workgroup memory as float16, SLICE dimensions at a
// time. Of a tile of KEYS keys, each of the TEAM subgroups that have the same MATRIX_M queries scores some keys;
// the softmax goes through workgroup memory; then each adds up MATRIX_N dimensions of every slice of the values.
// The slot `mask` says which positions a token attends to.
// uses: mask pair

struct Params {
    heads: u32,
    kv_heads: u32,
    ring: u32, // positions that the cache holds
    window: u32,
    tokens: u32, // of q
}

override THREADS: u32;
override SUBGROUP: u32; // threads of a subgroup
override HEAD_DIM: u32;
override QUERIES: u32;
override KEYS: u32;
override MATRIX_M: u32;
override MATRIX_N: u32;
override MATRIX_K: u32;
override ROUNDED: bool; // whether out is float16, and after its rows has their scales, as round_f16 leaves them

var<storage, read> q: array<vec4<f32>>;
var<storage, read> k_cache: array<vec4<u32>>; // eight float16 each
var<storage, read> v_cache: array<vec4<u32>>;
var<storage, read_write> out: array<Pair>;

const MASKED: f32 = -3.0e38; // the score of a key that a query does not attend to
const SLACK: f32 = 5.0; // a best score may be exceeded by so much before what was accumulated is scaled down
const TEAM: u32 = THREADS / SUBGROUP * MATRIX_M / QUERIES;
const TEAM_KEYS: u32 = KEYS / TEAM;
const SCORES: u32 = TEAM_KEYS / MATRIX_N; // matrices of a subgroup
const SLICE: u32 = TEAM * MATRIX_N;
const SLICES: u32 = HEAD_DIM / SLICE;
const LAST: u32 = SLICES - 1u;
const SLICE_VEC8S: u32 = SLICE / 8u;
const MATRIX: u32 = MATRIX_M * MATRIX_N;
const SHARES: u32 = THREADS / QUERIES; // threads that share the softmax of a query
const Q_ITEMS: u32 = QUERIES * SLICE_VEC8S;
const Q_EACH: u32 = (Q_ITEMS + THREADS - 1u) / THREADS; // eights of a slice that a thread fetches
const KV_EACH: u32 = KEYS * SLICE_VEC8S / THREADS;
// Lines are longer than needed, so that neighbouring lines use other banks.
const LINE: u32 = SLICE + 8u;
const S_LINE: u32 = KEYS + 4u;
const P_LINE: u32 = KEYS + 8u;

const_assert SCORES * MATRIX_N * TEAM == KEYS && SLICES * SLICE == HEAD_DIM && SLICES <= 8u;
const_assert QUERIES % MATRIX_M == 0u && KEYS % MATRIX_K == 0u && SLICE % MATRIX_K == 0u;
const_assert SHARES * QUERIES == THREADS && KV_EACH * THREADS == KEYS * SLICE_VEC8S;

alias Left = subgroup_matrix_left<f16, MATRIX_K, MATRIX_M>;
alias Right = subgroup_matrix_right<f16, MATRIX_N, MATRIX_K>;
alias Result = subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>;

// What a thread works on.
struct Work {
    thread: u32,
    kv_head: u32,
    first: u32, // number of the workgroup's first query, among those of the key-value head
    line: u32, // the subgroup's first query, among those of the workgroup
    member: u32, // the subgroup, among those of its team
    count: u32, // tokens
    high: u32, // the first position that no query of the workgroup attends to
}

// What a thread fetches of a slice of the keys or values, while another is multiplied.
alias Ahead = array<vec4<u32>, KV_EACH>;

var<workgroup> queries: array<f16, QUERIES * LINE>; // a slice of them
var<workgroup> tile: array<f16, KEYS * LINE>; // a slice of the tile's keys or values
var<workgroup> scores: array<f32, max(QUERIES * S_LINE, THREADS / SUBGROUP * MATRIX)>; // or a matrix of each subgroup
var<workgroup> weights: array<f16, QUERIES * P_LINE>;
var<workgroup> parts: array<f32, THREADS>;
var<workgroup> factors: array<f32, QUERIES>; // by which what was accumulated for a query is scaled
// The first says whether a factor is not 1. There are four, because matrices can only be loaded from arrays that
// begin at a multiple of 16 bytes, which they do on all GPUs if all arrays have such lengths.
var<workgroup> is_scaled: array<atomic<u32>, 4>;

// Where a query begins in q and out, by its number among those of its key-value head.
fn query_at(number: u32, kv_head: u32) -> u32 {
    let group = params.heads / params.kv_heads;
    return (number / group * params.heads + kv_head * group + number % group) * HEAD_DIM;
}

fn stage_queries(work: Work, slice: u32) {
    let last = params.tokens * (params.heads / params.kv_heads) - 1u;
    for (var i = 0u; i < Q_EACH; i++) {
        let item = work.thread + i * THREADS;
        if (item >= Q_ITEMS) {
            break;
        }
        let column = item % SLICE_VEC8S * 8u;
        let number = min(work.first + item / SLICE_VEC8S, last);
        let at = (query_at(number, work.kv_head) + slice * SLICE + column) / 4u;
        let a = vec4<f16>(q[at]);
        let b = vec4<f16>(q[at + 1u]);
        let to = item / SLICE_VEC8S * LINE + column;
        queries[to] = a.x;
        queries[to + 1u] = a.y;
        queries[to + 2u] = a.z;
        queries[to + 3u] = a.w;
        queries[to + 4u] = b.x;
        queries[to + 5u] = b.y;
        queries[to + 6u] = b.z;
        queries[to + 7u] = b.w;
    }
}

// Where in the cache an item of a slice begins, of the tile whose first position this is.
fn cache_at(work: Work, tile_first: u32, slice: u32, item: u32) -> u32 {
    let position = min(tile_first + item / SLICE_VEC8S, work.high - 1u);
    let line = batch.slot * params.ring + position % params.ring;
    let at = (line * params.kv_heads + work.kv_head) * HEAD_DIM + slice * SLICE;
    return at / 8u + item % SLICE_VEC8S;
}

fn fetch_keys(work: Work, tile_first: u32, slice: u32) -> Ahead {
    var ahead: Ahead;
    for (var i = 0u; i < KV_EACH; i++) {
        ahead[i] = k_cache[cache_at(work, tile_first, slice, work.thread + i * THREADS)];
    }
    return ahead;
}

fn fetch_values(work: Work, tile_first: u32, slice: u32) -> Ahead {
    var ahead: Ahead;
    for (var i = 0u; i < KV_EACH; i++) {
        ahead[i] = v_cache[cache_at(work, tile_first, slice, work.thread + i * THREADS)];
    }
    return ahead;
}

fn stage(ahead: Ahead, thread: u32) {
    for (var i = 0u; i < KV_EACH; i++) {
        let item = thread + i * THREADS;
        let to = item / SLICE_VEC8S * LINE + item % SLICE_VEC8S * 8u;
        for (var j = 0u; j < 4u; j++) {
            let pair = bitcast<vec2<f16>>(ahead[i][j]);
            tile[to + 2u * j] = pair.x;
            tile[to + 2u * j + 1u] = pair.y;
        }
    }
}

// Leaves q k^T of the tile's keys in `scores`.
fn score(work: Work, tile_first: u32) {
    let key = work.member * TEAM_KEYS; // the subgroup's first
    var sums: array<Result, SCORES>;
    var ahead = fetch_keys(work, tile_first, 0u);
    for (var slice = 0u; slice < SLICES; slice++) {
        workgroupBarrier();
        stage_queries(work, slice);
        stage(ahead, work.thread);
        workgroupBarrier();
        ahead = fetch_keys(work, tile_first, min(slice + 1u, LAST));
        for (var k = 0u; k < SLICE; k += MATRIX_K) {
            let left = subgroupMatrixLoad<Left>(&queries, work.line * LINE + k, false, LINE);
            for (var j = 0u; j < SCORES; j++) {
                let at = (key + j * MATRIX_N) * LINE + k;
                let right = subgroupMatrixLoad<Right>(&tile, at, true, LINE);
                sums[j] = subgroupMatrixMultiplyAccumulate(left, right, sums[j]);
            }
        }
    }
    for (var j = 0u; j < SCORES; j++) {
        subgroupMatrixStore(&scores, work.line * S_LINE + key + j * MATRIX_N, sums[j], false, S_LINE);
    }
}

// The softmax of a query so far.
struct Softmax {
    position: u32, // of the query, from which its window reaches back
    end: u32, // the first position that it does not attend to
    best: f32, // the score that weights are relative to
    total: f32, // of the weights, but only those that this thread has computed
}

// Turns the scores into weights relative to the best so far, and leaves in `factors` those for what was
// accumulated before.
fn soften(softmax: ptr<function, Softmax>, tile_first: u32, thread: u32) {
    let line = thread / SHARES;
    let share = thread % SHARES;
    var top = MASKED;
    for (var key = share; key < KEYS; key += SHARES) {
        let position = tile_first + key;
        let attended = position < (*softmax).end && position + params.window > (*softmax).position;
        let score = select(MASKED, scores[line * S_LINE + key], attended);
        scores[line * S_LINE + key] = score;
        top = max(top, score);
    }
    parts[thread] = top;
    if (thread == 0u) {
        atomicStore(&is_scaled[0], 0u);
    }
    workgroupBarrier();
    for (var i = 0u; i < SHARES; i++) {
        top = max(top, parts[line * SHARES + i]);
    }
    var factor = 1.0;
    if (top > (*softmax).best + SLACK) {
        if ((*softmax).best > MASKED) { // else nothing was accumulated
            factor = exp((*softmax).best - top);
            atomicStore(&is_scaled[0], 1u);
        }
        (*softmax).best = top;
    }
    if (share == 0u) {
        factors[line] = factor;
    }
    var total = (*softmax).total * factor;
    for (var key = share; key < KEYS; key += SHARES) {
        let score = scores[line * S_LINE + key];
        let weight = f16(select(exp(score - (*softmax).best), 0.0, score == MASKED));
        weights[line * P_LINE + key] = weight;
        total += f32(weight);
    }
    (*softmax).total = total;
}

// A matrix of every subgroup times the factors of its queries. It goes through `scores`.
fn scaled(values: Result, work: Work) -> Result {
    let mine = work.thread / SUBGROUP * MATRIX;
    workgroupBarrier();
    subgroupMatrixStore(&scores, mine, values, false, MATRIX_N);
    workgroupBarrier();
    for (var i = work.thread % SUBGROUP; i < MATRIX; i += SUBGROUP) {
        scores[mine + i] *= factors[work.line + i / MATRIX_N];
    }
    workgroupBarrier();
    return subgroupMatrixLoad<Result>(&scores, mine, false, MATRIX_N);
}

// What was accumulated of a slice, scaled where that is needed, plus the tile's values times their weights.
fn next_sum(before: Result, is_faded: bool, work: Work, tile_first: u32, slice: u32) -> Result {
    let ahead = fetch_values(work, tile_first, slice);
    var sum = before;
    if (is_faded) {
        sum = scaled(sum, work);
    }
    workgroupBarrier();
    stage(ahead, work.thread);
    workgroupBarrier();
    for (var key = 0u; key < KEYS; key += MATRIX_K) {
        let left = subgroupMatrixLoad<Left>(&weights, work.line * P_LINE + key, false, P_LINE);
        let right = subgroupMatrixLoad<Right>(&tile, key * LINE + work.member * MATRIX_N, false, LINE);
        sum = subgroupMatrixMultiplyAccumulate(left, right, sum);
    }
    return sum;
}

// Stores what was accumulated of a slice, times the factors of the queries.
fn store_slice(values: Result, work: Work, slice: u32) {
    let mine = work.thread / SUBGROUP * MATRIX;
    let column = slice * SLICE + work.member * MATRIX_N;
    workgroupBarrier();
    subgroupMatrixStore(&scores, mine, values, false, MATRIX_N);
    workgroupBarrier();
    for (var i = 2u * (work.thread % SUBGROUP); i < MATRIX; i += 2u * SUBGROUP) {
        let number = work.first + work.line + i / MATRIX_N;
        if (number / (params.heads / params.kv_heads) < work.count) {
            let to = query_at(number, work.kv_head) + column + i % MATRIX_N;
            let two = vec2(scores[mine + i], scores[mine + i + 1u]);
            out[to / 2u] = pair_of(two * factors[work.line + i / MATRIX_N]);
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let kv_head = workgroup.x;
    let group = params.heads / params.kv_heads;
    let first = workgroup.y * QUERIES; // of the workgroup's queries
    let count = min(batch.count, params.tokens);
    if (first / group >= count) {
        return;
    }
    let earliest = window_of(first / group);
    let low = earliest + 1u - min(earliest + 1u, params.window);
    let high = end_of_token(min((first + QUERIES - 1u) / group, count - 1u), count);
    let token = vec4((first + thread / SHARES) / group);
    var softmax = Softmax(windows_of(token).x, ends_of(token, count).x, MASKED, 0.0);
    let subgroup = thread / SUBGROUP;
    let work = Work(thread, kv_head, first, subgroup / TEAM * MATRIX_M, subgroup % TEAM, count, high);
    // Slices are written out: a loop with barriers does not unroll, and its index would move them out of registers.
    var values: array<Result, SLICES>;
    for (var tile_first = low; tile_first < high; tile_first += KEYS) {
        score(work, tile_first);
        workgroupBarrier();
        soften(&softmax, tile_first, thread);
        workgroupBarrier();
        let is_faded = workgroupUniformLoad(&is_scaled[0]) != 0u;
        values[0] = next_sum(values[0], is_faded, work, tile_first, 0u);
        if (LAST >= 1u) {
            values[min(1u, LAST)] = next_sum(values[min(1u, LAST)], is_faded, work, tile_first, 1u);
        }
        if (LAST >= 2u) {
            values[min(2u, LAST)] = next_sum(values[min(2u, LAST)], is_faded, work, tile_first, 2u);
        }
        if (LAST >= 3u) {
            values[min(3u, LAST)] = next_sum(values[min(3u, LAST)], is_faded, work, tile_first, 3u);
        }
        if (LAST >= 4u) {
            values[min(4u, LAST)] = next_sum(values[min(4u, LAST)], is_faded, work, tile_first, 4u);
        }
        if (LAST >= 5u) {
            values[min(5u, LAST)] = next_sum(values[min(5u, LAST)], is_faded, work, tile_first, 5u);
        }
        if (LAST >= 6u) {
            values[min(6u, LAST)] = next_sum(values[min(6u, LAST)], is_faded, work, tile_first, 6u);
        }
        if (LAST >= 7u) {
            values[min(7u, LAST)] = next_sum(values[min(7u, LAST)], is_faded, work, tile_first, 7u);
        }
    }
    parts[thread] = softmax.total;
    workgroupBarrier();
    if (thread < QUERIES) {
        var total = 0.0;
        for (var i = 0u; i < SHARES; i++) {
            total += parts[thread * SHARES + i];
        }
        factors[thread] = 1.0 / total;
        // A mean of float16 is none too large for float16: its scale is 1.
        let number = first + thread;
        if (ROUNDED && kv_head == 0u && number % group == 0u && number / group < count) {
            let scales = params.tokens * params.heads * (HEAD_DIM / 2u);
            out[scales + number / group] = pair_of(vec2(0.0, 1.875)); // the bits of 1.0
        }
    }
    store_slice(values[0], work, 0u);
    if (LAST >= 1u) {
        store_slice(values[min(1u, LAST)], work, 1u);
    }
    if (LAST >= 2u) {
        store_slice(values[min(2u, LAST)], work, 2u);
    }
    if (LAST >= 3u) {
        store_slice(values[min(3u, LAST)], work, 3u);
    }
    if (LAST >= 4u) {
        store_slice(values[min(4u, LAST)], work, 4u);
    }
    if (LAST >= 5u) {
        store_slice(values[min(5u, LAST)], work, 5u);
    }
    if (LAST >= 6u) {
        store_slice(values[min(6u, LAST)], work, 6u);
    }
    if (LAST >= 7u) {
        store_slice(values[min(7u, LAST)], work, 7u);
    }
}
