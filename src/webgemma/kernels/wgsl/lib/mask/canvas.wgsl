// A position of a canvas attends to all of the canvas, and before it to what the canvas's first position
// attends to.
// uses: batch=tokens

// The first position that the tile's last token, t, does not attend to.
fn end_of_token(t: u32, count: u32) -> u32 {
    return batch.first + count;
}

fn ends_of(tokens: vec4<u32>, count: u32) -> vec4<u32> {
    return vec4(batch.first + count);
}

// The position from which a token's window reaches back: the canvas's first.
fn window_of(t: u32) -> u32 {
    return batch.first;
}

fn windows_of(tokens: vec4<u32>) -> vec4<u32> {
    return vec4(batch.first);
}
