// h[t, head] = the splits of attention_decode put together: each scaled to the common maximum, over the common
// sum. One workgroup for each (head, token).
// uses: batch=tokens store

struct Params {
    heads: u32,
}

override THREADS: u32 = 64u;
override HEAD_DIM: u32;
override SPLITS: u32;

var<storage, read> parts: array<vec4<f32>>;
var<storage, read> sums: array<vec2<f32>>;
var<storage, read_write> h: array<Stored>;

const VEC4S: u32 = HEAD_DIM / 4u;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.y * params.heads + group.x;
    let first = row * SPLITS;
    var best = -3.0e38;
    for (var i = 0u; i < SPLITS; i++) {
        best = max(best, sums[first + i].x);
    }
    var total = 0.0;
    for (var i = 0u; i < SPLITS; i++) {
        total += sums[first + i].y * exp(sums[first + i].x - best);
    }
    for (var begin = 0u; begin < VEC4S; begin += THREADS) {
        let column = min(begin + thread, VEC4S - 1u);
        var sum = vec4(0.0);
        for (var i = 0u; i < SPLITS; i++) {
            sum += parts[(first + i) * VEC4S + column] * exp(sums[first + i].x - best);
        }
        let live = begin + thread < VEC4S && group.y < batch.count;
        store_vec4(row * VEC4S + begin + thread, sum / total, live, thread);
    }
}
