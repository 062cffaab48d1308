// output_token: a token becomes the last of the conversation, the next step's input, and a result to read.
// uses: batch=advancing

struct Params {
    ring: u32, // length of `tokens`
}

override RESULTS: u32;
override TOP: u32;

struct TokenLogprob {
    id: u32,
    logprob: f32,
}

var<storage, read_write> ids: array<u32>;
var<storage, read_write> tokens: array<u32>;
var<storage, read_write> results: array<TokenLogprob>;

fn output_token(token: u32, logprob: f32) {
    let length = batch.first + batch.count;
    results[length % RESULTS * (1u + TOP)] = TokenLogprob(token, logprob);
    tokens[length % params.ring] = token;
    ids[0] = token;
    batch.first = length;
    batch.count = 1u;
}
