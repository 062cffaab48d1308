// The batch: where its tokens begin and how many there are. Rows from `count` on are left alone.

struct Batch {
    first: u32, // position of the first token
    count: u32, // tokens
}

var<storage, read> batch: Batch;
