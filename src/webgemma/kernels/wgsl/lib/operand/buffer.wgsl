// x, the rows that a product reads, is a buffer.

var<storage, read> x: array<Value>;

fn prepare(group: u32, thread: u32) {}
