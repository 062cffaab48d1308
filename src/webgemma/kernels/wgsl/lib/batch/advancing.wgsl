// The batch as batch/rows, for the kernel that makes the sampled tokens the next ones to read.
// uses: conversations

var<storage, read_write> batch: Rows;
