// is_token: whether row t of a batch is a token.
// uses: batch=tokens

fn is_token(t: u32) -> bool {
    return t < batch.count;
}
