// Which tokens of a conversation's rows remain: that of the first row, and of each next one as long as the row before has
// led to the draft that it read. They become the last tokens of the conversation; the results of its other rows become
// NO_TOKEN. One workgroup; a thread for each row, of which that of a conversation's first row does it for all.
// uses: batch=advancing

struct Params {
    ring: u32, // length of `tokens` of a conversation
}

struct TokenLogprob {
    id: u32,
    logprob: f32,
}

const NO_TOKEN: u32 = 0xffffffffu;

var<storage, read_write> tokens: array<u32>; // [slot, ring]
var<storage, read_write> results: array<TokenLogprob>;

// Whether a row is so many ahead in the conversation of a slot.
fn is_ahead(row: u32, slot: u32, ahead: u32) -> bool {
    return row < min(batch.count, MAX_SLOTS) && slot_in(batch.rows[row]) == slot && ahead_in(batch.rows[row]) == ahead;
}

@compute @workgroup_size(MAX_SLOTS)
fn main(@builtin(local_invocation_index) row: u32) {
    let slot = slot_in(batch.rows[row]);
    if (!is_ahead(row, slot, 0u) || has_ended(batch.rows[row])) {
        return;
    }
    let position = batch.conversations[slot].position;
    var count = 0u; // of tokens that remain
    var goes_on = true;
    for (var ahead = 0u; is_ahead(row + ahead, slot, ahead); ahead++) {
        if (!goes_on) {
            results[row + ahead].id = NO_TOKEN;
            continue;
        }
        let token = results[row + ahead].id;
        count += 1u;
        tokens[slot * params.ring + (position + count) % params.ring] = token;
        goes_on = ahead < MAX_DRAFTS && token == batch.drafts[slot * MAX_DRAFTS + min(ahead, MAX_DRAFTS - 1u)];
    }
    batch.conversations[slot] = Conversation(position + count, results[row + count - 1u].id);
}
