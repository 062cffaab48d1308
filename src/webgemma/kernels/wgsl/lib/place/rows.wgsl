// slot_of, position_of: the slot and the position of row t, the next token of a conversation of its own.
// uses: batch=rows

fn slot_of(t: u32) -> u32 {
    return batch.slots[t];
}

fn position_of(t: u32) -> u32 {
    return batch.conversations[batch.slots[t]].position;
}
