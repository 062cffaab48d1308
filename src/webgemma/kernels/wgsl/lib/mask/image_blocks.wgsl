// A token attends to those before it and to itself; a soft token of an image to all of that image.
// uses: batch=soft_tokens

override QUERIES: u32;

fn end_of(t: u32) -> u32 {
    return max(batch.first + t + 1u, batch.ends[t]);
}

// The first position that no token of the tile, whose last is t, attends to.
fn end_of_token(t: u32, count: u32) -> u32 {
    var end = 0u;
    for (var i = 0u; i < min(QUERIES, t + 1u); i++) {
        end = max(end, end_of(t - i));
    }
    return end;
}

fn ends_of(tokens: vec4<u32>, count: u32) -> vec4<u32> {
    var ends: vec4<u32>;
    for (var i = 0u; i < 4u; i++) {
        ends[i] = end_of(min(tokens[i], count - 1u));
    }
    return ends;
}

// The position from which a token's window reaches back: the token's own.
fn window_of(t: u32) -> u32 {
    return batch.first + t;
}

fn windows_of(tokens: vec4<u32>) -> vec4<u32> {
    return vec4(batch.first) + tokens;
}
