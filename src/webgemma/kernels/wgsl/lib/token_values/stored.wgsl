// store_own, store_penalised: the logits of token i of all rows, for the kernels that choose among them.

var<storage, read_write> values: array<f32>; // of each token of a row: penalised, own

fn store_own(i: u32, value: f32) {
    values[2u * i + 1u] = value;
}

fn store_penalised(i: u32, value: f32) {
    values[2u * i] = value;
}
