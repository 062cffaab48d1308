// id_of: the id of row t, the token that its conversation reads next.
// uses: batch=rows

fn id_of(t: u32) -> u32 {
    return batch.conversations[batch.slots[t]].token;
}
