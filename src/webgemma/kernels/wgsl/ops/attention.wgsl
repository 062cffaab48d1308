// One token's attention, from the raw projections on: for each head, q = rope(rms(q) * q_norm) and
// softmax(q k^T) v over the positions it sees, with an online softmax. One workgroup for each (head,
// share of the positions); a share leaves its maximum, its sum and its unnormalised values for
// attention_merge. With a cache of its own (OWN_CACHE 1), the layer's last share is the token itself:
// k = rope(rms(k) * k_norm) and v = rms(v) are made there and go into the cache.

struct Params {
    heads: u32,
    kv_heads: u32,
    raw_heads: u32, // heads in `raw`
    ring: u32, // positions the cache holds
    window: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> raw: array<vec4<f32>>; // q, k and (unless k is v) v heads
@group(0) @binding(3) var<storage, read> norms: array<vec4<f32>>; // q_norm, then k_norm
@group(0) @binding(4) var<storage, read> turns: array<vec2<u32>>; // see rope.wgsl
@group(0) @binding(5) var<storage, read_write> k_cache: array<KvFour>;
@group(0) @binding(6) var<storage, read_write> v_cache: array<KvFour>;
@group(0) @binding(7) var<storage, read_write> parts: array<vec4<f32>>; // [head, share, FOURS]
@group(0) @binding(8) var<storage, read_write> sums: array<vec2<f32>>; // [head, share]: maximum, sum

const FOURS: u32 = HEAD_DIM / 4u;
const LANES: u32 = 4u; // threads that share a key's score
const KEYS: u32 = THREADS / LANES; // keys of a tile
const STEPS: u32 = FOURS / LANES;
const OWN: u32 = (FOURS + THREADS - 1u) / THREADS; // fours of the output that a thread gathers
const TEAMS: u32 = max(1u, THREADS / FOURS); // teams of threads that share the keys of a tile
const TURNS: u32 = KEYS / TEAMS;

const_assert STEPS * LANES == FOURS && TURNS * TEAMS == KEYS;

const HALF: u32 = FOURS / 2u;

var<workgroup> query: array<vec4<f32>, FOURS>;
var<workgroup> lane_scores: array<f32, THREADS>;
var<workgroup> scores: array<f32, KEYS>;
var<workgroup> slots: array<u32, KEYS>;
var<workgroup> team_parts: array<vec4<f32>, THREADS>;
var<workgroup> team_totals: array<f32, THREADS>;

// 1 / rms of a raw head.
fn size_of(head: u32, thread: u32) -> f32 {
    var squares = 0.0;
    for (var i = thread; i < FOURS; i += THREADS) {
        squares += dot(raw[head * FOURS + i], raw[head * FOURS + i]);
    }
    return inverseSqrt(workgroup_sum(squares, thread) / f32(HEAD_DIM) + params.eps);
}

// Two fours of a raw head, HALF apart, normed and turned; kind 0 is a query, 1 a key.
fn turned(head: u32, kind: u32, size: f32, i: u32) -> array<vec4<f32>, 2> {
    let a = raw[head * FOURS + i] * size * norms[kind * FOURS + i];
    let b = raw[head * FOURS + HALF + i] * size * norms[kind * FOURS + HALF + i];
    return rotated(a, b, state.first, i);
}

// The share of the token itself: one key, as the cache will hold it.
fn attend_itself(head: u32, kv_head: u32, to: u32, thread: u32) {
    let k_head = params.heads + kv_head;
    let v_head = params.raw_heads - params.kv_heads + kv_head;
    let k_size = size_of(k_head, thread);
    let v_size = size_of(v_head, thread);
    let slot = (state.first % params.ring * params.kv_heads + kv_head) * FOURS;
    let writes = head % (params.heads / params.kv_heads) == 0u;
    var part = 0.0;
    for (var i = thread; i < HALF; i += THREADS) {
        let pair = turned(k_head, 1u, k_size, i);
        let a = pack_kv(pair[0]);
        let b = pack_kv(pair[1]);
        part += dot(query[i], unpack_kv(a)) + dot(query[HALF + i], unpack_kv(b));
        if (writes) {
            k_cache[slot + i] = a;
            k_cache[slot + HALF + i] = b;
        }
    }
    for (var i = thread; i < FOURS; i += THREADS) {
        let v = pack_kv(raw[v_head * FOURS + i] * v_size);
        parts[to * FOURS + i] = unpack_kv(v);
        if (writes) {
            v_cache[slot + i] = v;
        }
    }
    let score = workgroup_sum(part, thread);
    if (thread == 0u) {
        sums[to] = vec2(score, 1.0);
    }
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group.x;
    let kv_head = head / (params.heads / params.kv_heads);
    let to = head * groups.y + group.y;
    let q_size = size_of(head, thread);
    for (var i = thread; i < HALF; i += THREADS) {
        let pair = turned(head, 0u, q_size, i);
        query[i] = pair[0];
        query[HALF + i] = pair[1];
    }
    workgroupBarrier();
    let shares = groups.y - OWN_CACHE;
    if (group.y == shares) {
        attend_itself(head, kv_head, to, thread);
        return;
    }
    let last = state.first;
    let seen = min(last + 1u, params.window) - OWN_CACHE; // in the cache
    let begin = last + 1u - OWN_CACHE - seen;
    let share = (seen + shares * KEYS - 1u) / (shares * KEYS) * KEYS; // whole tiles
    let low = begin + min(seen, share * group.y);
    let high = begin + min(seen, share * (group.y + 1u));
    let team = thread / FOURS;
    let lane = thread % LANES;

    var best = -3.0e38;
    var total = 0.0;
    var gathered: array<vec4<f32>, OWN>;
    for (var tile = low; tile < high; tile += KEYS) {
        // beyond the last key, keys repeat it with a weight of nothing: loops of fixed length unroll
        let key = min(tile + thread / LANES, high - 1u);
        let slot = (key % params.ring * params.kv_heads + kv_head) * FOURS;
        var part = 0.0;
        for (var step = 0u; step < STEPS; step++) {
            part += dot(query[step * LANES + lane], unpack_kv(k_cache[slot + step * LANES + lane]));
        }
        lane_scores[thread] = part;
        if (lane == 0u) {
            slots[thread / LANES] = slot;
        }
        workgroupBarrier();
        if (thread < KEYS) {
            let at = thread * LANES;
            let sum = lane_scores[at] + lane_scores[at + 1u] + lane_scores[at + 2u] + lane_scores[at + 3u];
            scores[thread] = select(-3.0e38, sum, tile + thread < high);
        }
        workgroupBarrier();
        var top = best;
        for (var j = 0u; j < KEYS; j++) {
            top = max(top, scores[j]);
        }
        let fade = exp(best - top);
        best = top;
        total *= fade;
        for (var own = 0u; own < OWN; own++) {
            gathered[own] *= fade;
        }
        for (var turn = 0u; turn < TURNS; turn++) {
            let j = turn * TEAMS + team % TEAMS;
            let p = exp(scores[j] - best);
            total += p;
            for (var own = 0u; own < OWN; own++) {
                let four = own * THREADS + thread % FOURS;
                gathered[own] += p * unpack_kv(v_cache[slots[j] + four]);
            }
        }
        workgroupBarrier(); // scores and slots have been read
    }

    team_totals[thread] = total;
    for (var own = 0u; own < OWN; own++) {
        workgroupBarrier();
        team_parts[thread] = gathered[own];
        workgroupBarrier();
        if (team == 0u) {
            var sum = vec4(0.0);
            for (var i = 0u; i < TEAMS; i++) {
                sum += team_parts[thread + i * FOURS];
            }
            parts[to * FOURS + own * THREADS + thread] = sum;
        }
    }
    if (thread == 0u) {
        var sum = 0.0;
        for (var i = 0u; i < TEAMS; i++) {
            sum += team_totals[i * FOURS];
        }
        sums[to] = vec2(best, sum);
    }
}
