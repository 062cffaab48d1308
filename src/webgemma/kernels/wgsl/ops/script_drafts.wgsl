// Drafts that are right so often, to measure what drafts are worth: that of a position is the token of `script` there, if a
// draw of that position is below `right` (of 2^24), else another token. One workgroup; a thread for each conversation,
// which has LINE rows.
// uses: batch=advancing random

struct Params {
    seed: u32,
    right: u32,
    vocab: u32,
}

override LINE: u32;

var<storage, read> script: array<u32>; // of each position

@compute @workgroup_size(MAX_SLOTS)
fn main(@builtin(local_invocation_index) line: u32) {
    let row = line * LINE;
    if (row >= batch.count) {
        return;
    }
    let slot = slot_in(batch.rows[row]);
    let position = batch.conversations[slot].position;
    for (var ahead = 1u; ahead < LINE; ahead++) {
        let at = min(position + ahead, arrayLength(&script) - 1u);
        let is_right = draw(vec2(params.seed, 0u), position + ahead) < params.right;
        batch.drafts[slot * MAX_DRAFTS + ahead - 1u] = select((script[at] + 1u) % params.vocab, script[at], is_right);
    }
}
