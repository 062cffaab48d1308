// out[t, head] = softmax(q k^T) v over the positions that t sees, for many tokens, with an online
// softmax. One workgroup for each key-value head and QUERIES of its queries (the heads of one token
// after those of another), so that a tile of KEYS keys and values serves them all. Of a tile, a
// thread first sums scores of 4 queries by 4 keys over every SPLIT-th four of HEAD_DIM (the SPLIT
// threads of the same place add up), then turns some into shares of the softmax, then gathers four
// dimensions of the values for 4 * OWN queries. sees_past, sees_all, sees_blocks or
// sees_canvas says how far a token sees, and
// attend_all or attend_some which of the keys are the dispatch's.

struct Params {
    heads: u32,
    kv_heads: u32,
    ring: u32, // positions the cache holds
    window: u32,
    batch: u32, // tokens of q
    begin: u32, // with attend_some: the keys of the dispatch, counted from the first that is seen
    end: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> k_cache: array<KvFour>;
@group(0) @binding(4) var<storage, read> v_cache: array<KvFour>;
@group(0) @binding(5) var<storage, read_write> out: array<vec4<f32>>;

const UNSEEN: f32 = -1.0e30; // the score of a key that a query does not see
const FOURS: u32 = HEAD_DIM / 4u;
// Fours of a head that pass through workgroup memory at once.
const SLICE: u32 = select(6u, min(8u, FOURS), FOURS % min(8u, FOURS) == 0u);
const QUADS: u32 = QUERIES / 4u;
const ACROSS: u32 = KEYS / 4u; // threads along the keys
const PLACES: u32 = ACROSS * QUADS;
const SPLIT: u32 = THREADS / PLACES;
const PARTS: u32 = min(16u, THREADS / QUADS); // threads that share the softmax of four queries
const GROUPS: u32 = min(THREADS / FOURS, QUADS); // threads that gather the same dimensions
const OWN: u32 = QUADS / GROUPS;

const_assert FOURS % SLICE == 0u && KEYS <= THREADS;
const_assert SPLIT * PLACES == THREADS && SPLIT <= SLICE && OWN * GROUPS == QUADS;

alias Gathered = array<array<vec4<f32>, 4>, OWN>; // of a thread: four dimensions for each query

// What four queries have seen so far.
struct Softmax {
    positions: vec4<u32>, // of the queries, from which their windows reach back
    ends: vec4<u32>, // the first positions that they do not see
    best: vec4<f32>, // score
    total: vec4<f32>, // of the shares, but only those that this thread has made
}

var<workgroup> queries: array<vec4<f32>, QUERIES * SLICE>;
var<workgroup> tile: array<vec4<f32>, KEYS * max(SLICE, QUADS)>; // keys, then scores
var<workgroup> slots: array<u32, KEYS>; // where the tile's keys begin in the cache
var<workgroup> parts: array<vec4<f32>, PARTS * QUADS>;
var<workgroup> fades: array<vec4<f32>, QUADS>;

// Where a four of a line stands: turned by the line, so that neighbours use other banks.
fn place(line: u32, four: u32) -> u32 {
    return line * SLICE + (four + line) % SLICE;
}

// Where a query begins in q and out, by its number among those of its key-value head.
fn query_at(number: u32, kv_head: u32) -> u32 {
    let group = params.heads / params.kv_heads;
    return (number / group * params.heads + kv_head * group + number % group) * FOURS;
}

fn load_slice(first: u32, kv_head: u32, slice: u32, thread: u32) {
    let last = params.batch * (params.heads / params.kv_heads) - 1u;
    for (var i = thread; i < QUERIES * SLICE; i += THREADS) {
        let at = query_at(min(first + i / SLICE, last), kv_head) + slice + i % SLICE;
        queries[place(i / SLICE, i % SLICE)] = q[at];
    }
    for (var i = thread; i < KEYS * SLICE; i += THREADS) {
        tile[place(i / SLICE, i % SLICE)] = unpack_kv(k_cache[slots[i / SLICE] + slice + i % SLICE]);
    }
}

// Leaves q k^T of the tile's keys in `tile`.
fn score(first: u32, kv_head: u32, thread: u32) {
    let across = thread % ACROSS;
    let quad = thread / ACROSS % QUADS;
    let share = thread / PLACES;
    var sums: array<vec4<f32>, 4>;
    for (var slice = 0u; slice < FOURS; slice += SLICE) {
        workgroupBarrier();
        load_slice(first, kv_head, slice, thread);
        workgroupBarrier();
        for (var i = share; i < SLICE; i += SPLIT) {
            let a = transpose(mat4x4<f32>( // a column is four queries in one dimension
                queries[place(4u * quad, i)],
                queries[place(4u * quad + 1u, i)],
                queries[place(4u * quad + 2u, i)],
                queries[place(4u * quad + 3u, i)],
            ));
            for (var j = 0u; j < 4u; j++) {
                let key = tile[place(across + j * ACROSS, i)];
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

// Turns the scores into shares of the best so far, and leaves in `fades` how much that one has faded.
fn soften(softmax: ptr<function, Softmax>, tile_first: u32, thread: u32) {
    let quad = thread % QUADS;
    let part = thread / QUADS;
    let positions = (*softmax).positions;
    var top = (*softmax).best;
    for (var key = part; key < KEYS && part < PARTS; key += PARTS) {
        let position = vec4(tile_first + key);
        let seen = (position < (*softmax).ends) & (position + vec4(params.window) > positions);
        let score = select(vec4(UNSEEN), tile[key * QUADS + quad], seen);
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
    // While a query has seen no key, its shares are 1 each: the first key seen fades them to 0.
    let fade = exp((*softmax).best - top);
    var total = (*softmax).total * fade;
    for (var key = part; key < KEYS && part < PARTS; key += PARTS) {
        let share = exp(tile[key * QUADS + quad] - top);
        tile[key * QUADS + quad] = share;
        total += share;
    }
    (*softmax).best = top;
    (*softmax).total = total;
    if (part == 0u) {
        fades[quad] = fade;
    }
    workgroupBarrier();
}

// What the threads that share a quad's softmax have left in `parts`.
fn total_of(quad: u32) -> vec4<f32> {
    var total = vec4(0.0);
    for (var j = 0u; j < PARTS; j++) {
        total += parts[j * QUADS + quad];
    }
    return total;
}

// Fades what was gathered and adds the tile's values, times their shares.
fn gather(gathered: ptr<function, Gathered>, four: u32, own: u32) {
    for (var i = 0u; i < OWN; i++) {
        let fade = fades[own + i];
        for (var c = 0u; c < 4u; c++) {
            (*gathered)[i][c] *= fade[c];
        }
    }
    for (var key = 0u; key < KEYS; key += 4u) {
        var values: array<vec4<f32>, 4>; // read first, so that four reads are under way at once
        for (var j = 0u; j < 4u; j++) {
            values[j] = unpack_kv(v_cache[slots[key + j] + four]);
        }
        for (var j = 0u; j < 4u; j++) {
            for (var i = 0u; i < OWN; i++) {
                let shares = tile[(key + j) * QUADS + own + i];
                for (var c = 0u; c < 4u; c++) {
                    (*gathered)[i][c] = fma(vec4(shares[c]), values[j], (*gathered)[i][c]);
                }
            }
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let kv_head = workgroup.x;
    let group = params.heads / params.kv_heads;
    let first = workgroup.y * QUERIES; // of the workgroup's queries
    let count = min(state.count, params.batch);
    if (first / group >= count) {
        return;
    }
    let earliest = window_of(first / group);
    let low = earliest + 1u - min(earliest + 1u, params.window);
    let high = end_seen(min((first + QUERIES - 1u) / group, count - 1u), count);
    let numbers = vec4(first + 4u * (thread % QUADS)) + vec4(0u, 1u, 2u, 3u);
    let tokens = numbers / vec4(group);
    var softmax = Softmax(windows_of(tokens), ends_seen(tokens, count), vec4(UNSEEN), vec4(0.0));
    let four = thread % FOURS; // the dimensions this thread gathers
    let own = thread / FOURS * OWN; // and the first of the quads it gathers them for
    var gathered: Gathered;
    let here = workgroup.y * params.kv_heads + kv_head;
    let begin = begin_of(low);
    let end = end_of(low, high);
    if (begin >= end) {
        return;
    }
    if (begin > low) {
        find_best(&softmax, here, thread);
        for (var i = 0u; i < OWN && own < QUADS; i++) {
            for (var c = 0u; c < 4u; c++) {
                let number = min(first + 4u * (own + i) + c, count * group - 1u);
                gathered[i][c] = out[query_at(number, kv_head) + four];
            }
        }
    }
    for (var tile_first = begin; tile_first < end; tile_first += KEYS) {
        workgroupBarrier();
        if (thread < KEYS) {
            let position = min(tile_first + thread, high - 1u);
            slots[thread] = (position % params.ring * params.kv_heads + kv_head) * FOURS;
        }
        score(first, kv_head, thread);
        soften(&softmax, tile_first, thread);
        if (own < QUADS) {
            gather(&gathered, four, own);
        }
    }
    if (thread < PARTS * QUADS) {
        parts[thread] = softmax.total;
    }
    workgroupBarrier();
    if (end < high) {
        leave_best(softmax.best, here, thread);
    }
    for (var i = 0u; i < OWN && own < QUADS; i++) {
        var total = total_of(own + i);
        if (end < high) {
            total = vec4(1.0);
        }
        for (var c = 0u; c < 4u; c++) {
            let number = first + 4u * (own + i) + c;
            if (number / group < count) {
                out[query_at(number, kv_head) + four] = gathered[i][c] / total[c];
            }
        }
    }
}
