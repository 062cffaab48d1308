// output_token: a token becomes the last of the row's conversation, the next that it reads, and a result for the host.
// uses: batch=advancing sampling_settings

struct Params {
    ring: u32, // length of `tokens` of a conversation
}

struct TokenLogprob {
    id: u32,
    logprob: f32,
}

var<storage, read_write> tokens: array<u32>; // [slot, ring]
var<storage, read_write> results: array<TokenLogprob>; // of all rows the chosen token, then the likeliest, and so on

fn output_token(slot: u32, token: u32, logprob: f32) {
    if (row >= batch.count || has_ended(batch.rows[row])) {
        return;
    }
    let length = batch.conversations[slot].position + 1u;
    results[row] = TokenLogprob(token, logprob);
    tokens[slot * params.ring + length % params.ring] = token;
    batch.conversations[slot] = Conversation(length, token);
}
