// out[t, head] = softmax(q k^T) v, every patch attending to every other, on the GPU's matrix units, with an online
// softmax. A workgroup has a head and QUERIES of its queries, and takes KEYS keys at a time; a subgroup has
// MATRIX_M of the queries, with all keys and dimensions, and keeps queries and sums in registers. Keys and values
// go through workgroup memory, in lines that zeros lengthen to whole matrices; scores, too, to become weights.
// uses: batch=tokens clamped pair

struct Params {
    heads: u32,
    patches: u32, // of q, k, v and out
    low: f32, // to which the result is clamped
    high: f32,
}

override THREADS: u32;
override SUBGROUP: u32; // threads of a subgroup
override HEAD_DIM: u32;
override DIMENSIONS: u32; // of a head, with those of zeros
override QUERIES: u32;
override KEYS: u32;
override MATRIX_M: u32;
override MATRIX_N: u32;
override MATRIX_K: u32;
override ROUNDED: bool; // whether out is float16, and after its rows has their scales, as round_f16 leaves them

var<storage, read> q: array<vec4<u32>>; // eight float16 each
var<storage, read> k: array<vec4<u32>>;
var<storage, read> v: array<vec4<u32>>;
var<storage, read_write> out: array<Pair>;

const MASKED: f32 = -3.0e38; // the score of a key beyond the last
const SLACK: f32 = 5.0; // a best score may be exceeded by so much before what was accumulated is scaled down
const VEC8S: u32 = HEAD_DIM / 8u;
const STEPS: u32 = DIMENSIONS / MATRIX_K; // matrices of a subgroup: of queries,
const SCORES: u32 = KEYS / MATRIX_N; // of scores,
const SUMS: u32 = DIMENSIONS / MATRIX_N; // and of sums
const LAST: u32 = SUMS - 1u;
const SHARES: u32 = SUBGROUP / MATRIX_M; // threads that share the softmax of a query
const OWN: u32 = KEYS / SHARES; // scores of a thread
const Q_ITEMS: u32 = QUERIES * VEC8S;
const ITEMS: u32 = KEYS * VEC8S; // eights of the keys of a tile, and as many of its values
const EACH: u32 = (ITEMS + THREADS - 1u) / THREADS;
// Lines are longer than needed, so that neighbouring lines use other banks.
const LINE: u32 = DIMENSIONS + 8u;
const S_LINE: u32 = KEYS + 4u;
const P_LINE: u32 = KEYS + 8u;

const_assert THREADS / SUBGROUP * MATRIX_M == QUERIES && QUERIES <= 2u * KEYS && VEC8S * 8u == HEAD_DIM;
const_assert SHARES * MATRIX_M == SUBGROUP && OWN * SHARES == KEYS;
const_assert SCORES * MATRIX_N == KEYS && KEYS % MATRIX_K == 0u && SUMS <= 9u;
const_assert SUMS * MATRIX_N == DIMENSIONS && STEPS * MATRIX_K == DIMENSIONS && DIMENSIONS >= HEAD_DIM;

alias Left = subgroup_matrix_left<f16, MATRIX_K, MATRIX_M>;
alias Right = subgroup_matrix_right<f16, MATRIX_N, MATRIX_K>;
alias Result = subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>;

// What a thread works on.
struct Work {
    thread: u32,
    lane: u32, // the thread, among those of its subgroup
    line: u32, // the subgroup's first query, among those of the workgroup
    query: u32, // the workgroup's first
    count: u32, // patches
    first: u32, // of a patch's vec4s, that of the head
    step: u32, // from a patch to the next
}

// What a thread fetches of the keys and values, while others are multiplied.
alias Ahead = array<vec4<u32>, EACH>;

var<workgroup> tile: array<f16, 2u * KEYS * LINE>; // keys, then values; or queries
var<workgroup> scores: array<f32, QUERIES * S_LINE>; // or a matrix of each subgroup
var<workgroup> weights: array<f16, QUERIES * P_LINE>;
var<workgroup> factors: array<f32, QUERIES>; // by which what was accumulated for a query is scaled
// The last tile for which a factor was not 1, counted from 1. There are four, because matrices can only be loaded from
// arrays that begin at a multiple of 16 bytes, which they do on all GPUs if all arrays have such lengths.
var<workgroup> last_scaled: array<atomic<u32>, 4>;

// Where an item of a tile is in q, k or v; beyond the last patch, that one is read again.
fn vec8_at(work: Work, patch_first: u32, item: u32) -> u32 {
    return min(patch_first + item / VEC8S, work.count - 1u) * work.step + work.first + item % VEC8S;
}

fn fetch_keys(work: Work, key: u32) -> Ahead {
    var ahead: Ahead;
    for (var i = 0u; i < EACH; i++) {
        ahead[i] = k[vec8_at(work, key, min(work.thread + i * THREADS, ITEMS - 1u))];
    }
    return ahead;
}

fn fetch_values(work: Work, key: u32) -> Ahead {
    var ahead: Ahead;
    for (var i = 0u; i < EACH; i++) {
        ahead[i] = v[vec8_at(work, key, min(work.thread + i * THREADS, ITEMS - 1u))];
    }
    return ahead;
}

fn stage_eight(values: vec4<u32>, to: u32) {
    for (var j = 0u; j < 4u; j++) {
        let two = bitcast<vec2<f16>>(values[j]);
        tile[to + 2u * j] = two.x;
        tile[to + 2u * j + 1u] = two.y;
    }
}

// What was fetched goes into the lines of the tile from this one on.
fn stage(ahead: Ahead, line: u32, thread: u32) {
    for (var i = 0u; i < EACH; i++) {
        let item = thread + i * THREADS;
        if (ITEMS % THREADS == 0u || item < ITEMS) {
            stage_eight(ahead[i], (line + item / VEC8S) * LINE + item % VEC8S * 8u);
        }
    }
}

fn stage_queries(work: Work) {
    for (var item = work.thread; item < Q_ITEMS; item += THREADS) {
        stage_eight(q[vec8_at(work, work.query, item)], item / VEC8S * LINE + item % VEC8S * 8u);
    }
}

// The softmax of a query so far.
struct Softmax {
    best: f32, // the score that weights are relative to
    total: f32, // of the weights, but only those that this thread has computed
}

// Turns the scores of a tile, by its number, into weights relative to the best so far, and leaves in `factors` those
// for what was accumulated before.
fn soften(softmax: ptr<function, Softmax>, number: u32, work: Work) {
    let line = work.line + work.lane / SHARES;
    let share = work.lane % SHARES;
    let remaining = work.count - number * KEYS;
    var own: array<f32, OWN>;
    var top = MASKED;
    for (var i = 0u; i < OWN; i++) {
        let key = i * SHARES + share;
        own[i] = select(MASKED, scores[line * S_LINE + key], key < remaining);
        top = max(top, own[i]);
    }
    for (var step = SHARES / 2u; step > 0u; step = step / 2u) {
        top = max(top, subgroupShuffleXor(top, step));
    }
    var factor = 1.0;
    if (top > (*softmax).best + SLACK) {
        if (number > 0u) { // else nothing was accumulated
            factor = exp((*softmax).best - top);
            atomicStore(&last_scaled[0], number);
        }
        (*softmax).best = top;
    }
    if (share == 0u) {
        factors[line] = factor;
    }
    var total = (*softmax).total * factor;
    for (var i = 0u; i < OWN; i++) {
        let weight = f16(exp(own[i] - (*softmax).best));
        weights[line * P_LINE + i * SHARES + share] = weight;
        total += f32(weight);
    }
    (*softmax).total = total;
}

// A matrix of every subgroup times the factors of its queries. It goes through `scores`.
fn scaled(values: Result, work: Work) -> Result {
    subgroupMatrixStore(&scores, work.line * S_LINE, values, false, S_LINE);
    workgroupBarrier();
    for (var i = work.lane; i < MATRIX_M * MATRIX_N; i += SUBGROUP) {
        let line = work.line + i / MATRIX_N;
        scores[line * S_LINE + i % MATRIX_N] *= factors[line];
    }
    workgroupBarrier();
    let result = subgroupMatrixLoad<Result>(&scores, work.line * S_LINE, false, S_LINE);
    workgroupBarrier();
    return result;
}

// Stores a matrix of every subgroup, times the factors of its queries.
fn store_sums(values: Result, work: Work, number: u32) {
    workgroupBarrier();
    subgroupMatrixStore(&scores, work.line * S_LINE, values, false, S_LINE);
    workgroupBarrier();
    for (var i = work.lane; i < MATRIX_M * MATRIX_N / 2u; i += SUBGROUP) {
        let line = work.line + i / (MATRIX_N / 2u);
        let column = i % (MATRIX_N / 2u) * 2u;
        let dimension = number * MATRIX_N + column;
        let t = work.query + line;
        if (t < work.count && dimension < HEAD_DIM) {
            let at = line * S_LINE + column;
            let a = clamped(scores[at] * factors[line], params.low, params.high);
            let b = clamped(scores[at + 1u] * factors[line], params.low, params.high);
            out[t * work.step * 4u + work.first * 4u + dimension / 2u] = pair_of(vec2(a, b));
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
    let lane = thread % SUBGROUP;
    let line = thread / SUBGROUP * MATRIX_M;
    let work = Work(thread, lane, line, query, count, group.x * VEC8S, params.heads * VEC8S);
    stage_queries(work);
    var keys = fetch_keys(work, 0u);
    workgroupBarrier();
    // Matrices stay in variables of this function, where loops without barriers unroll: they have to be in registers.
    var left: array<Left, STEPS>;
    for (var i = 0u; i < STEPS; i++) {
        left[i] = subgroupMatrixLoad<Left>(&tile, line * LINE + i * MATRIX_K, false, LINE);
    }
    workgroupBarrier();
    stage(keys, 0u, thread);
    keys = fetch_keys(work, KEYS);
    var values = fetch_values(work, 0u);
    workgroupBarrier();
    var softmax = Softmax(MASKED, 0.0);
    var sums: array<Result, SUMS>;
    for (var number = 0u; number * KEYS < count; number++) {
        var products = array<Result, SCORES>(); // q k^T; a bare `var` may be zeroed only once
        for (var i = 0u; i < STEPS; i++) {
            for (var j = 0u; j < SCORES; j++) {
                let right = subgroupMatrixLoad<Right>(&tile, j * MATRIX_N * LINE + i * MATRIX_K, true, LINE);
                products[j] = subgroupMatrixMultiplyAccumulate(left[i], right, products[j]);
            }
        }
        for (var j = 0u; j < SCORES; j++) {
            subgroupMatrixStore(&scores, line * S_LINE + j * MATRIX_N, products[j], false, S_LINE);
        }
        workgroupBarrier();
        // Until the next barrier the tile is read by nobody: its values are staged, and the keys of the next.
        soften(&softmax, number, work);
        stage(values, KEYS, thread);
        stage(keys, 0u, thread);
        values = fetch_values(work, (number + 1u) * KEYS); // before the barrier, as in tiled_product
        keys = fetch_keys(work, (number + 2u) * KEYS);
        let is_scaled = workgroupUniformLoad(&last_scaled[0]) == number;
        if (is_scaled && number > 0u) { // written out: a loop with barriers does not unroll
            sums[0] = scaled(sums[0], work);
            if (LAST >= 1u) {
                sums[min(1u, LAST)] = scaled(sums[min(1u, LAST)], work);
            }
            if (LAST >= 2u) {
                sums[min(2u, LAST)] = scaled(sums[min(2u, LAST)], work);
            }
            if (LAST >= 3u) {
                sums[min(3u, LAST)] = scaled(sums[min(3u, LAST)], work);
            }
            if (LAST >= 4u) {
                sums[min(4u, LAST)] = scaled(sums[min(4u, LAST)], work);
            }
            if (LAST >= 5u) {
                sums[min(5u, LAST)] = scaled(sums[min(5u, LAST)], work);
            }
            if (LAST >= 6u) {
                sums[min(6u, LAST)] = scaled(sums[min(6u, LAST)], work);
            }
            if (LAST >= 7u) {
                sums[min(7u, LAST)] = scaled(sums[min(7u, LAST)], work);
            }
            if (LAST >= 8u) {
                sums[min(8u, LAST)] = scaled(sums[min(8u, LAST)], work);
            }
        }
        for (var key = 0u; key < KEYS; key += MATRIX_K) {
            let weight = subgroupMatrixLoad<Left>(&weights, line * P_LINE + key, false, P_LINE);
            for (var j = 0u; j < SUMS; j++) {
                let right = subgroupMatrixLoad<Right>(&tile, (KEYS + key) * LINE + j * MATRIX_N, false, LINE);
                sums[j] = subgroupMatrixMultiplyAccumulate(weight, right, sums[j]);
            }
        }
    }
    var total = softmax.total;
    for (var step = SHARES / 2u; step > 0u; step = step / 2u) {
        total += subgroupShuffleXor(total, step);
    }
    factors[line + lane / SHARES] = 1.0 / total;
    store_sums(sums[0], work, 0u);
    if (LAST >= 1u) {
        store_sums(sums[min(1u, LAST)], work, 1u);
    }
    if (LAST >= 2u) {
        store_sums(sums[min(2u, LAST)], work, 2u);
    }
    if (LAST >= 3u) {
        store_sums(sums[min(3u, LAST)], work, 3u);
    }
    if (LAST >= 4u) {
        store_sums(sums[min(4u, LAST)], work, 4u);
    }
    if (LAST >= 5u) {
        store_sums(sums[min(5u, LAST)], work, 5u);
    }
    if (LAST >= 6u) {
        store_sums(sums[min(6u, LAST)], work, 6u);
    }
    if (LAST >= 7u) {
        store_sums(sums[min(7u, LAST)], work, 7u);
    }
    if (LAST >= 8u) {
        store_sums(sums[min(8u, LAST)], work, 8u);
    }
    // A mean of values is as large as one of them, normed: at most the root of HEAD_DIM.
    if (ROUNDED && group.x == 0u && thread < QUERIES && query + thread < count) {
        out[params.patches * work.step * 4u + query + thread] = pair_of(vec2(0.0, 1.875)); // the bits of 1.0
    }
}
