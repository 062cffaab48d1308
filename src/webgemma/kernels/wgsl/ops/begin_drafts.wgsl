// What a drafter reads first, of each conversation that takes part, which has LINE rows of the batch: its table, with the
// token that the conversation reads next and its position, and the right half of u, the state after the token before.
// One workgroup for each conversation.
// uses: batch=rows

struct Params {
    width: u32, // of a state
}

override THREADS: u32;
override LINE: u32;

var<storage, read> states: array<vec4<f32>>; // [slot, width]
var<storage, read_write> drafting: Rows;
var<storage, read_write> u: array<vec4<f32>>; // [conversation, 2 * width]

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.x * LINE;
    if (group.x == 0u && thread == 0u) {
        drafting.count = batch.count / LINE;
    }
    if (row >= batch.count) {
        return;
    }
    let slot = slot_in(batch.rows[row]);
    if (thread == 0u) {
        drafting.rows[group.x] = slot;
        drafting.conversations[slot] = batch.conversations[slot];
    }
    let vec4s = params.width / 4u;
    for (var i = thread; i < vec4s; i += THREADS) {
        u[(2u * group.x + 1u) * vec4s + i] = states[slot * vec4s + i];
    }
}
