// slot_of, position_of: the slot and the position of row t, a token of the one conversation of a batch.
// uses: batch=tokens

fn slot_of(t: u32) -> u32 {
    return batch.slot;
}

fn position_of(t: u32) -> u32 {
    return batch.first + t;
}
