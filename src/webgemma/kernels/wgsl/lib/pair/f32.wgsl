// pair_of: two neighbouring values as they are stored, in float32.

alias Pair = vec2<f32>;

fn pair_of(values: vec2<f32>) -> Pair {
    return values;
}
