// The batch as batch/tokens, with the tokens of several texts after each other: for each token where its text begins
// and ends.

struct Batch {
    first: u32, // position of the first token
    count: u32, // tokens
    slot: u32,
    reserved: u32,
    texts: array<vec2<u32>>, // the position of a text's first token, and the one after its last
}

var<storage, read> batch: Batch;
