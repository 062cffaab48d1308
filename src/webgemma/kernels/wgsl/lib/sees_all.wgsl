// A token sees all of its batch.

fn end_seen(t: u32, count: u32) -> u32 {
    return state.first + count;
}

fn ends_seen(tokens: vec4<u32>, count: u32) -> vec4<u32> {
    return vec4(state.first + count);
}

// Where a token's window ends: at the token.
fn window_of(t: u32) -> u32 {
    return state.first + t;
}

fn windows_of(tokens: vec4<u32>) -> vec4<u32> {
    return vec4(state.first) + tokens;
}
