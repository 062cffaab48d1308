// The batch as batch/tokens, with soft tokens among its tokens: for each of them the first position that it does not
// attend to.

struct Batch {
    first: u32, // position of the first token
    count: u32, // tokens
    slot: u32,
    reserved: u32,
    ends: array<u32>, // 0 for a token that is not soft
}

var<storage, read> batch: Batch;
