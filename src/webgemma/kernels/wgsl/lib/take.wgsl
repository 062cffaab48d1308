// take: a token becomes the last of the conversation, the next step's input, and a result to read.

struct Pair {
    id: u32,
    logprob: f32,
}

@group(0) @binding(2) var<storage, read_write> state: State;
@group(0) @binding(3) var<storage, read_write> ids: array<u32>;
@group(0) @binding(4) var<storage, read_write> tokens: array<u32>;
@group(0) @binding(5) var<storage, read_write> results: array<Pair>;

fn take(token: u32, logprob: f32) {
    let length = state.first + state.count;
    results[length % RESULTS * (1u + TOP)] = Pair(token, logprob);
    tokens[length % params.ring] = token;
    ids[0] = token;
    state.first = length;
    state.count = 1u;
}
