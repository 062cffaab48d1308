// The highest logit of each CHUNK of a row, with its token. One workgroup for each chunk and row.
// uses: workgroup_best

struct Params {
    vocab: u32,
}

override THREADS: u32;
override CHUNK: u32;

var<storage, read> logits: array<f32>; // [row, vocab]
var<storage, read_write> bests: array<Best>; // [row, chunk]

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let first = group.x * CHUNK;
    let end = min(first + CHUNK, params.vocab);
    var mine = Best(LOWEST, first);
    for (var id = first + thread; id < end; id += THREADS) {
        mine = better(mine, Best(logits[group.y * params.vocab + id], id));
    }
    let best = workgroup_best(mine, thread);
    if (thread == 0u) {
        bests[group.y * groups.x + group.x] = best;
    }
}
