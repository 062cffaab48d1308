// slot_of, position_of: the slot and the position of row t, the next token of a conversation or a draft after it.
// uses: batch=rows

fn slot_of(t: u32) -> u32 {
    return slot_in(batch.rows[t]);
}

fn position_of(t: u32) -> u32 {
    return batch.conversations[slot_of(t)].position + ahead_in(batch.rows[t]);
}
