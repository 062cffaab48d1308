// The draft of each conversation, so many ahead: the token with the highest of `count` logits, the lowest id where equal.
// It is the one that the drafter reads next. One workgroup for each row of the drafter.
// uses: batch=advancing workgroup_best

struct Params {
    count: u32,
}

override THREADS: u32;
override AHEAD: u32; // 1 for the first draft

var<storage, read> bests: array<Best>; // [row, count]
var<storage, read_write> drafting: Rows;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.x;
    var mine = Best(LOWEST, NO_ID);
    for (var i = thread; i < params.count; i += THREADS) {
        mine = better(mine, bests[row * params.count + i]);
    }
    let best = workgroup_best(mine, thread);
    if (thread == 0u && row < drafting.count) {
        let slot = slot_in(drafting.rows[row]);
        let token = select(best.id, 0u, best.id == NO_ID); // where no logit is a number
        drafting.conversations[slot].token = token;
        batch.drafts[slot * MAX_DRAFTS + AHEAD - 1u] = token;
    }
}
