// A token attends to its own text, before and after it; with a window, to the positions that are less than that away.
// uses: batch=texts

fn text_of(t: u32) -> vec2<u32> {
    return batch.texts[min(t, batch.count - 1u)];
}

fn end_of(t: u32) -> u32 {
    return min(text_of(t).y, batch.first + t + params.window);
}

// From here a window of the usual length reaches back to the first position that a token attends to.
fn window_of(t: u32) -> u32 {
    return max(text_of(t).x + params.window - 1u, batch.first + t);
}

// The first position that the tile's last token, t, does not attend to: those before it end earlier.
fn end_of_token(t: u32, count: u32) -> u32 {
    return end_of(t);
}

fn ends_of(tokens: vec4<u32>, count: u32) -> vec4<u32> {
    return vec4(end_of(tokens.x), end_of(tokens.y), end_of(tokens.z), end_of(tokens.w));
}

fn windows_of(tokens: vec4<u32>) -> vec4<u32> {
    return vec4(window_of(tokens.x), window_of(tokens.y), window_of(tokens.z), window_of(tokens.w));
}
