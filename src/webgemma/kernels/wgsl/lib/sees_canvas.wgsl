// A position of a canvas sees all of it, and of what was read before what the first one sees.

fn end_seen(t: u32, count: u32) -> u32 {
    return state.first + count;
}

fn ends_seen(tokens: vec4<u32>, count: u32) -> vec4<u32> {
    return vec4(state.first + count);
}

// Where a token's window ends: where the canvas begins.
fn window_of(t: u32) -> u32 {
    return state.first;
}

fn windows_of(tokens: vec4<u32>) -> vec4<u32> {
    return vec4(state.first);
}
