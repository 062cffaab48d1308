// The backward pass of p = softmax(s) over the keys that a query attends to, ds = p (dp - sum p dp), in place: s becomes
// p, dp becomes ds, both zero for keys that it does not attend to. One workgroup per row: a query of the `group`
// that a token has for each key-value head, tokens from first_token on, one after the other.
// uses: workgroup_sum workgroup_max

struct Params {
    keys: u32, // of a row
    group: u32,
    rows: u32, // of each of the grid's y
    first_token: u32, // in its sequence
    window: u32,
}

override THREADS: u32;

var<storage, read_write> s: array<f32>;
var<storage, read_write> dp: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = (group.y * params.rows + group.x) * params.keys;
    let token = params.first_token + group.x / params.group;
    let end = min(token + 1u, params.keys);
    let begin = end - min(end, params.window);
    var best = -3.0e38;
    for (var i = begin + thread; i < end; i += THREADS) {
        best = max(best, s[at + i]);
    }
    best = workgroup_max(best, thread);
    var total = 0.0;
    var dots = 0.0;
    for (var i = begin + thread; i < end; i += THREADS) {
        let weight = exp(s[at + i] - best);
        total += weight;
        dots += weight * dp[at + i];
    }
    let scale = 1.0 / workgroup_sum(total, thread);
    let mean = workgroup_sum(dots, thread) * scale;
    for (var i = thread; i < params.keys; i += THREADS) {
        let attended = i >= begin && i < end;
        let p = select(0.0, exp(s[at + i] - best) * scale, attended);
        s[at + i] = p;
        dp[at + i] = select(0.0, p * (dp[at + i] - mean), attended);
    }
}
