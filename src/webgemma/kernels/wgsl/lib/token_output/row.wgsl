// output_token: a token becomes the result of its row; accept_drafts decides what of it remains.
// uses: batch=rows sampling_settings

struct TokenLogprob {
    id: u32,
    logprob: f32,
}

var<storage, read_write> results: array<TokenLogprob>; // of all rows the chosen token, then the likeliest, and so on

fn output_token(slot: u32, token: u32, logprob: f32) {
    if (row < batch.count) {
        results[row] = TokenLogprob(token, logprob);
    }
}
