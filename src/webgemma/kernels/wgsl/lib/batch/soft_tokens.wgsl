// The batch with soft tokens among its tokens: where it begins, how many tokens there are, and for each
// soft token the first position that it does not attend to.

struct Batch {
    first: u32, // position of the first token
    count: u32, // tokens
    ends: array<u32>, // 0 for a token that is not soft
}

var<storage, read> batch: Batch;
