// id_of: the id of row t, the token that its conversation reads next, or a draft.
// uses: place=rows

fn id_of(t: u32) -> u32 {
    let slot = slot_in(batch.rows[t]);
    let ahead = ahead_in(batch.rows[t]);
    if (ahead > 0u) {
        return batch.drafts[slot * MAX_DRAFTS + ahead - 1u];
    }
    return batch.conversations[slot].token;
}
