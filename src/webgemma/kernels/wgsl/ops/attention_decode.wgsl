// The attention of one token of each conversation, from the raw projections on: for each head, q = rope(rms(q) * q_norm) and
// softmax(q k^T) v over the positions it attends to, with an online softmax. One workgroup for each (head,
// split of the positions, token); a split leaves its maximum, its sum and its unnormalised values for
// attention_merge. With a cache of its own (OWN_CACHE 1), the layer's last split is the token itself:
// k = rope(rms(k) * k_norm) and v = rms(v) are computed there and go into the cache, unless they are STORED there.
// uses: place raw_head workgroup_sum kv

struct Params {
    heads: u32,
    kv_heads: u32,
    raw_heads: u32, // heads in `raw`
    ring: u32, // positions that a slot of the cache holds
    window: u32,
}

override THREADS: u32;
override OWN_CACHE: u32;
override STORED: bool = false; // by kv_heads, for rows that attend to each other
override UNREAD: bool = false; // the token is a drafter's: the cache ends before it, and nothing is added

var<storage, read> rotations: array<vec2<u32>>; // see rope/fixed_point
var<storage, read_write> k_cache: array<KvVec4>;
var<storage, read_write> v_cache: array<KvVec4>;
var<storage, read_write> parts: array<vec4<f32>>; // [token, head, split, VEC4S]
var<storage, read_write> sums: array<vec2<f32>>; // [token, head, split]: maximum, sum

const LANES: u32 = 4u; // threads that share a key's score
const KEYS: u32 = THREADS / LANES; // keys of a tile
const STEPS: u32 = VEC4S / LANES;
const OWN: u32 = (VEC4S + THREADS - 1u) / THREADS; // vec4s of the output that a thread accumulates
const TEAMS: u32 = max(1u, THREADS / VEC4S); // teams of threads that share the keys of a tile
const TURNS: u32 = KEYS / TEAMS;

const_assert STEPS * LANES == VEC4S && TURNS * TEAMS == KEYS;

const LOWEST: f32 = -3.0e38; // the score of a key that does not count

var<workgroup> query: array<vec4<f32>, VEC4S>;
var<workgroup> lane_scores: array<f32, THREADS>;
var<workgroup> scores: array<f32, KEYS>;
var<workgroup> offsets: array<u32, KEYS>; // where the tile's keys begin in the cache
var<workgroup> team_parts: array<vec4<f32>, THREADS>;
var<workgroup> team_totals: array<f32, THREADS>;

// The split of the token itself: one key, as the cache will hold it.
fn attend_to_itself(t: u32, head: u32, kv_head: u32, to: u32, thread: u32) {
    let k_head = t * params.raw_heads + params.heads + kv_head;
    let v_head = (t + 1u) * params.raw_heads - params.kv_heads + kv_head;
    let position = position_of(t);
    let k_size = inverse_rms(k_head, thread);
    let v_size = value_size(v_head, thread);
    let line = slot_of(t) * params.ring + position % params.ring;
    let offset = (line * params.kv_heads + kv_head) * VEC4S;
    let writes = !STORED && head % (params.heads / params.kv_heads) == 0u;
    var part = 0.0;
    for (var i = thread; i < HALF; i += THREADS) {
        let pair = rotated(k_head, 1u, k_size, position, i);
        let a = pack_kv(pair[0]);
        let b = pack_kv(pair[1]);
        part += dot(query[i], unpack_kv(a)) + dot(query[HALF + i], unpack_kv(b));
        if (writes) {
            k_cache[offset + i] = a;
            k_cache[offset + HALF + i] = b;
        }
    }
    for (var i = thread; i < VEC4S; i += THREADS) {
        let v = pack_kv(raw_vec4(v_head * VEC4S + i) * v_size);
        parts[to * VEC4S + i] = unpack_kv(v);
        if (writes) {
            v_cache[offset + i] = v;
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
    let t = group.z;
    if (t >= batch.count) {
        return;
    }
    let head = group.x;
    let kv_head = head / (params.heads / params.kv_heads);
    let to = (t * params.heads + head) * groups.y + group.y;
    let position = position_of(t);
    let splits = groups.y - OWN_CACHE;
    let missing = max(OWN_CACHE, u32(UNREAD)); // whether the cache ends before the token
    let cached = min(position + 1u, params.window) - missing; // positions attended to in the cache
    let begin = position + 1u - missing - cached;
    let split = (cached + splits * KEYS - 1u) / (splits * KEYS) * KEYS; // whole tiles
    let low = begin + min(cached, split * group.y);
    let high = begin + min(cached, split * (group.y + 1u));
    if (group.y < splits && low == high) { // there are fewer positions than splits
        for (var i = thread; i < VEC4S; i += THREADS) {
            parts[to * VEC4S + i] = vec4(0.0);
        }
        if (thread == 0u) {
            sums[to] = vec2(LOWEST, 0.0);
        }
        return;
    }
    let q_head = t * params.raw_heads + head;
    let q_size = inverse_rms(q_head, thread);
    for (var i = thread; i < HALF; i += THREADS) {
        let pair = rotated(q_head, 0u, q_size, position, i);
        query[i] = pair[0];
        query[HALF + i] = pair[1];
    }
    workgroupBarrier();
    if (group.y == splits) {
        attend_to_itself(t, head, kv_head, to, thread);
        return;
    }
    let first_line = slot_of(t) * params.ring;
    let team = thread / VEC4S;
    let lane = thread % LANES;

    var best = LOWEST;
    var total = 0.0;
    var values: array<vec4<f32>, OWN>;
    for (var tile = low; tile < high; tile += KEYS) {
        // Beyond the last key, keys repeat it with a weight of zero: loops of fixed length unroll.
        let key = min(tile + thread / LANES, high - 1u);
        let offset = ((first_line + key % params.ring) * params.kv_heads + kv_head) * VEC4S;
        var part = 0.0;
        for (var step = 0u; step < STEPS; step++) {
            part += dot(query[step * LANES + lane], unpack_kv(k_cache[offset + step * LANES + lane]));
        }
        lane_scores[thread] = part;
        if (lane == 0u) {
            offsets[thread / LANES] = offset;
        }
        workgroupBarrier();
        if (thread < KEYS) {
            let at = thread * LANES;
            let sum = lane_scores[at] + lane_scores[at + 1u] + lane_scores[at + 2u] + lane_scores[at + 3u];
            scores[thread] = select(LOWEST, sum, tile + thread < high);
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
            values[own] *= fade;
        }
        for (var turn = 0u; turn < TURNS; turn++) {
            let j = turn * TEAMS + team % TEAMS;
            let p = exp(scores[j] - best);
            total += p;
            for (var own = 0u; own < OWN; own++) {
                let i = own * THREADS + thread % VEC4S;
                values[own] += p * unpack_kv(v_cache[offsets[j] + i]);
            }
        }
        workgroupBarrier(); // scores and offsets have been read
    }

    team_totals[thread] = total;
    for (var own = 0u; own < OWN; own++) {
        workgroupBarrier();
        team_parts[thread] = values[own];
        workgroupBarrier();
        if (team == 0u) {
            var sum = vec4(0.0);
            for (var i = 0u; i < TEAMS; i++) {
                sum += team_parts[thread + i * VEC4S];
            }
            parts[to * VEC4S + own * THREADS + thread] = sum;
        }
    }
    if (thread == 0u) {
        var sum = 0.0;
        for (var i = 0u; i < TEAMS; i++) {
            sum += team_totals[i * VEC4S];
        }
        sums[to] = vec2(best, sum);
    }
}
