// is_allowed: whether a token may follow row t: its bit of the row's mask, if it has one.
// uses: batch=rows

struct Params {
    mask_words: u32, // of a row
}

var<storage, read> masks: array<u32>;

fn is_allowed(t: u32, id: u32) -> bool {
    return !is_masked(batch.rows[t]) || extractBits(masks[t * params.mask_words + id / 32u], id % 32u, 1u) == 1u;
}
