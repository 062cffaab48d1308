// A token attends to those before it, and to itself.
// uses: batch=tokens

// The first position that the tile's last token, t, does not attend to.
fn end_of_token(t: u32, count: u32) -> u32 {
    return batch.first + t + 1u;
}

fn ends_of(tokens: vec4<u32>, count: u32) -> vec4<u32> {
    return vec4(batch.first + 1u) + tokens;
}

// The position from which a token's window reaches back: the token's own.
fn window_of(t: u32) -> u32 {
    return batch.first + t;
}

fn windows_of(tokens: vec4<u32>) -> vec4<u32> {
    return vec4(batch.first) + tokens;
}
