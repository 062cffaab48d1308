// A token sees those before it and itself; one of a picture all of that picture.

fn end_of_token(t: u32) -> u32 {
    return max(state.first + t + 1u, state.ends[t]);
}

fn end_seen(last: u32, count: u32) -> u32 {
    var end = 0u;
    for (var i = 0u; i < min(QUERIES, last + 1u); i++) {
        end = max(end, end_of_token(last - i));
    }
    return end;
}

fn ends_seen(tokens: vec4<u32>, count: u32) -> vec4<u32> {
    var ends: vec4<u32>;
    for (var i = 0u; i < 4u; i++) {
        ends[i] = end_of_token(min(tokens[i], count - 1u));
    }
    return ends;
}

// Where a token's window ends: at the token.
fn window_of(t: u32) -> u32 {
    return state.first + t;
}

fn windows_of(tokens: vec4<u32>) -> vec4<u32> {
    return vec4(state.first) + tokens;
}
