// store_own, store_penalised: nothing, where the best of every chunk is all that is read.

fn store_own(i: u32, value: f32) {}

fn store_penalised(i: u32, value: f32) {}
