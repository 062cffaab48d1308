// The batch as batch/tokens, for the kernel that makes the sampled token the next batch.

struct Batch {
    first: u32, // position of the first token
    count: u32, // tokens
}

var<storage, read_write> batch: Batch;
