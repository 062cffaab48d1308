// out[t, head] = softmax(q k^T) v over the positions that t attends to, for many tokens, with an online
// softmax. One workgroup for each key-value head and QUERIES of its queries (the heads of one token after
// those of another), so that a tile of KEYS keys and values serves them all. Of a tile, a thread first sums
// scores of 4 queries by 4 keys over every SPLIT-th vec4 of HEAD_DIM (the SPLIT threads of the same spot add
// up), then turns some into weights of the softmax, then accumulates four dimensions of the values for 4 * OWN
// queries. The slot `mask` says which positions a token attends to, `key_range` which keys are this dispatch's.
// Each layer of the grid has a sequence of its own: those of q, out and the caches follow each other.
// uses: mask key_range kv

struct Params {
    heads: u32,
    kv_heads: u32,
    ring: u32, // positions that the cache holds
    window: u32,
    tokens: u32, // of q
}

override THREADS: u32;
override HEAD_DIM: u32;
override QUERIES: u32;
override KEYS: u32;

var<storage, read> q: array<vec4<f32>>;
var<storage, read> k_cache: array<KvVec4>;
var<storage, read> v_cache: array<KvVec4>;
var<storage, read_write> out: array<vec4<f32>>;

const MASKED: f32 = -3.0e38; // the score of a key that a query does not attend to
const VEC4S: u32 = HEAD_DIM / 4u;
// vec4s of a head that go through workgroup memory at once.
const SLICE: u32 = select(6u, min(8u, VEC4S), VEC4S % min(8u, VEC4S) == 0u);
const QUADS: u32 = QUERIES / 4u;
const ACROSS: u32 = KEYS / 4u; // threads along the keys
const SPOTS: u32 = ACROSS * QUADS;
const SPLIT: u32 = THREADS / SPOTS;
const PARTS: u32 = min(16u, THREADS / QUADS); // threads that share the softmax of four queries
const GROUPS: u32 = min(THREADS / VEC4S, QUADS); // threads that accumulate the same dimensions
const OWN: u32 = QUADS / GROUPS;

const_assert VEC4S % SLICE == 0u && KEYS <= THREADS;
const_assert SPLIT * SPOTS == THREADS && SPLIT <= SLICE && OWN * GROUPS == QUADS;

alias Values = array<array<vec4<f32>, 4>, OWN>; // of a thread: four dimensions for each query

// The softmax of four queries so far.
struct Softmax {
    positions: vec4<u32>, // of the queries, from which their windows reach back
    ends: vec4<u32>, // the first positions that they do not attend to
    best: vec4<f32>, // score
    total: vec4<f32>, // of the weights, but only those that this thread has computed
}

var<workgroup> queries: array<vec4<f32>, QUERIES * SLICE>;
var<workgroup> tile: array<vec4<f32>, KEYS * max(SLICE, QUADS)>; // keys, then scores
var<workgroup> offsets: array<u32, KEYS>; // where the tile's keys begin in the cache
var<workgroup> parts: array<vec4<f32>, PARTS * QUADS>;
var<workgroup> fades: array<vec4<f32>, QUADS>;

var<private> sequence: u32;

// The index of a vec4 of a line: rotated by the line, so that neighbours use other banks.
fn tile_index(line: u32, i: u32) -> u32 {
    return line * SLICE + (i + line) % SLICE;
}

// Where a query begins in q and out, by its number among those of its key-value head.
fn query_at(number: u32, kv_head: u32) -> u32 {
    let group = params.heads / params.kv_heads;
    let token = sequence * params.tokens + number / group;
    return (token * params.heads + kv_head * group + number % group) * VEC4S;
}

fn load_slice(first: u32, kv_head: u32, slice: u32, thread: u32) {
    let last = params.tokens * (params.heads / params.kv_heads) - 1u;
    for (var i = thread; i < QUERIES * SLICE; i += THREADS) {
        let at = query_at(min(first + i / SLICE, last), kv_head) + slice + i % SLICE;
        queries[tile_index(i / SLICE, i % SLICE)] = q[at];
    }
    for (var i = thread; i < KEYS * SLICE; i += THREADS) {
        tile[tile_index(i / SLICE, i % SLICE)] = unpack_kv(k_cache[offsets[i / SLICE] + slice + i % SLICE]);
    }
}

// Leaves q k^T of the tile's keys in `tile`.
fn score(first: u32, kv_head: u32, thread: u32) {
    let across = thread % ACROSS;
    let quad = thread / ACROSS % QUADS;
    let share = thread / SPOTS;
    var sums: array<vec4<f32>, 4>;
    for (var slice = 0u; slice < VEC4S; slice += SLICE) {
        workgroupBarrier();
        load_slice(first, kv_head, slice, thread);
        workgroupBarrier();
        for (var i = share; i < SLICE; i += SPLIT) {
            let a = transpose(mat4x4<f32>( // a column is four queries in one dimension
                queries[tile_index(4u * quad, i)],
                queries[tile_index(4u * quad + 1u, i)],
                queries[tile_index(4u * quad + 2u, i)],
                queries[tile_index(4u * quad + 3u, i)],
            ));
            for (var j = 0u; j < 4u; j++) {
                let key = tile[tile_index(across + j * ACROSS, i)];
                var sum = sums[j];
                sum = fma(a[0], vec4(key.x), sum);
                sum = fma(a[1], vec4(key.y), sum);
                sum = fma(a[2], vec4(key.z), sum);
                sums[j] = fma(a[3], vec4(key.w), sum);
            }
        }
    }
    for (var turn = 0u; turn < SPLIT; turn++) {
        workgroupBarrier();
        for (var j = 0u; j < 4u && share == turn; j++) {
            let at = (across + j * ACROSS) * QUADS + quad;
            tile[at] = select(tile[at], vec4(0.0), turn == 0u) + sums[j];
        }
    }
    workgroupBarrier();
}

// Turns the scores into weights relative to the best so far, and leaves in `fades` the factor for what was
// accumulated before.
fn soften(softmax: ptr<function, Softmax>, tile_first: u32, thread: u32) {
    let quad = thread % QUADS;
    let part = thread / QUADS;
    let positions = (*softmax).positions;
    var top = (*softmax).best;
    for (var key = part; key < KEYS && part < PARTS; key += PARTS) {
        let position = vec4(tile_first + key);
        let attended = (position < (*softmax).ends) & (position + vec4(params.window) > positions);
        let score = select(vec4(MASKED), tile[key * QUADS + quad], attended);
        tile[key * QUADS + quad] = score;
        top = max(top, score);
    }
    if (part < PARTS) {
        parts[thread] = top;
    }
    workgroupBarrier();
    for (var i = 0u; i < PARTS; i++) {
        top = max(top, parts[i * QUADS + quad]);
    }
    // While a query has attended to no key, its weights are 1 each: the first attended key fades them to 0.
    let fade = exp((*softmax).best - top);
    var total = (*softmax).total * fade;
    for (var key = part; key < KEYS && part < PARTS; key += PARTS) {
        let weight = exp(tile[key * QUADS + quad] - top);
        tile[key * QUADS + quad] = weight;
        total += weight;
    }
    (*softmax).best = top;
    (*softmax).total = total;
    if (part == 0u) {
        fades[quad] = fade;
    }
    workgroupBarrier();
}

// The sum of what the threads that share a quad's softmax have left in `parts`.
fn total_of(quad: u32) -> vec4<f32> {
    var total = vec4(0.0);
    for (var j = 0u; j < PARTS; j++) {
        total += parts[j * QUADS + quad];
    }
    return total;
}

// Fades what was accumulated and adds the tile's values times their weights.
fn accumulate(values: ptr<function, Values>, column: u32, own: u32) {
    for (var i = 0u; i < OWN; i++) {
        let fade = fades[own + i];
        for (var c = 0u; c < 4u; c++) {
            (*values)[i][c] *= fade[c];
        }
    }
    for (var key = 0u; key < KEYS; key += 4u) {
        var v: array<vec4<f32>, 4>; // read first, so that four reads are under way at once
        for (var j = 0u; j < 4u; j++) {
            v[j] = unpack_kv(v_cache[offsets[key + j] + column]);
        }
        for (var j = 0u; j < 4u; j++) {
            for (var i = 0u; i < OWN; i++) {
                let weights = tile[(key + j) * QUADS + own + i];
                for (var c = 0u; c < 4u; c++) {
                    (*values)[i][c] = fma(vec4(weights[c]), v[j], (*values)[i][c]);
                }
            }
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let kv_head = workgroup.x;
    sequence = workgroup.z;
    let group = params.heads / params.kv_heads;
    let first = workgroup.y * QUERIES; // of the workgroup's queries
    let count = min(batch.count, params.tokens);
    if (first / group >= count) {
        return;
    }
    let earliest = window_of(first / group);
    let low = earliest + 1u - min(earliest + 1u, params.window);
    let high = end_of_token(min((first + QUERIES - 1u) / group, count - 1u), count);
    let numbers = vec4(first + 4u * (thread % QUADS)) + vec4(0u, 1u, 2u, 3u);
    let tokens = numbers / vec4(group);
    var softmax = Softmax(windows_of(tokens), ends_of(tokens, count), vec4(MASKED), vec4(0.0));
    let column = thread % VEC4S; // the dimensions that this thread accumulates
    let own = thread / VEC4S * OWN; // and the first of the quads it accumulates them for
    var values: Values;
    let here = (sequence * groups.y + workgroup.y) * params.kv_heads + kv_head;
    let begin = range_begin(low);
    let end = range_end(low, high);
    if (begin >= end) {
        return;
    }
    if (begin > low) {
        resume(&softmax, here, thread);
        for (var i = 0u; i < OWN && own < QUADS; i++) {
            for (var c = 0u; c < 4u; c++) {
                let number = min(first + 4u * (own + i) + c, count * group - 1u);
                values[i][c] = out[query_at(number, kv_head) + column];
            }
        }
    }
    for (var tile_first = begin; tile_first < end; tile_first += KEYS) {
        workgroupBarrier();
        if (thread < KEYS) {
            let position = min(tile_first + thread, high - 1u);
            let line = (batch.slot + sequence) * params.ring + position % params.ring;
            offsets[thread] = (line * params.kv_heads + kv_head) * VEC4S;
        }
        score(first, kv_head, thread);
        soften(&softmax, tile_first, thread);
        if (own < QUADS) {
            accumulate(&values, column, own);
        }
    }
    if (thread < PARTS * QUADS) {
        parts[thread] = softmax.total;
    }
    workgroupBarrier();
    if (end < high) {
        suspend(softmax.best, here, thread);
    }
    for (var i = 0u; i < OWN && own < QUADS; i++) {
        var total = total_of(own + i);
        if (end < high) {
            total = vec4(1.0);
        }
        for (var c = 0u; c < 4u; c++) {
            let number = first + 4u * (own + i) + c;
            if (number / group < count) {
                out[query_at(number, kv_head) + column] = values[i][c] / total[c];
            }
        }
    }
}
