// with_token: the context's part, where tokens have no per-layer embeddings of their own.

fn with_token(context: f32, at: u32) -> f32 {
    return context;
}
