// out[t, head] = softmax(q k^T) v over the positions that t sees, with an online softmax. One
// workgroup for each (head, token, share of the positions); a share leaves its maximum, its sum and
// its unnormalised values for attention_merge.

struct Params {
    heads: u32,
    kv_heads: u32,
    ring: u32,
    window: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> k_cache: array<KvFour>;
@group(0) @binding(4) var<storage, read> v_cache: array<KvFour>;
@group(0) @binding(5) var<storage, read_write> parts: array<vec4<f32>>; // [t, head, share, FOURS]
@group(0) @binding(6) var<storage, read_write> sums: array<vec2<f32>>; // [t, head, share]: maximum, sum

const FOURS: u32 = HEAD_DIM / 4u;
const LANES: u32 = 4u; // threads that share a key's score
const KEYS: u32 = THREADS / LANES; // keys of a tile
const STEPS: u32 = FOURS / LANES;
const OWN: u32 = (FOURS + THREADS - 1u) / THREADS; // fours of the output that a thread gathers
const TEAMS: u32 = max(1u, THREADS / FOURS); // teams of threads that share the keys of a tile
const TURNS: u32 = KEYS / TEAMS;

const_assert STEPS * LANES == FOURS && TURNS * TEAMS == KEYS;

var<workgroup> query: array<vec4<f32>, FOURS>;
var<workgroup> lane_scores: array<f32, THREADS>;
var<workgroup> scores: array<f32, KEYS>;
var<workgroup> slots: array<u32, KEYS>;
var<workgroup> team_parts: array<vec4<f32>, THREADS>;
var<workgroup> team_totals: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group.x;
    let t = group.y;
    let shares = groups.z;
    let kv_head = head / (params.heads / params.kv_heads);
    let place = t * params.heads + head;
    for (var i = thread; i < FOURS; i += THREADS) {
        query[i] = q[place * FOURS + i];
    }
    let last = state.first + t;
    let seen = min(last + 1u, params.window);
    let begin = last + 1u - seen;
    let share = (seen + shares * KEYS - 1u) / (shares * KEYS) * KEYS; // whole tiles
    let low = begin + min(seen, share * group.z);
    let high = begin + min(seen, share * (group.z + 1u));
    let team = thread / FOURS;
    let lane = thread % LANES;
    workgroupBarrier();

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

    let to = place * shares + group.z;
    team_totals[thread] = total;
    for (var own = 0u; own < OWN; own++) {
        workgroupBarrier();
        team_parts[thread] = gathered[own];
        workgroupBarrier();
        if (team == 0u && t < state.count) {
            var sum = vec4(0.0);
            for (var i = 0u; i < TEAMS; i++) {
                sum += team_parts[thread + i * FOURS];
            }
            parts[to * FOURS + own * THREADS + thread] = sum;
        }
    }
    if (thread == 0u && t < state.count) {
        var sum = 0.0;
        for (var i = 0u; i < TEAMS; i++) {
            sum += team_totals[i * FOURS];
        }
        sums[to] = vec2(best, sum);
    }
}
