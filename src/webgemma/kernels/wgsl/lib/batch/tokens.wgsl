// The batch: where the tokens of a conversation begin, how many there are, and which slot of the caches is its own.
// Rows from `count` on are left alone.

struct Batch {
    first: u32, // position of the first token
    count: u32, // tokens
    slot: u32,
    reserved: u32,
}

var<storage, read> batch: Batch;
