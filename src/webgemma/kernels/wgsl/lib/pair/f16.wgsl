// pair_of: two neighbouring values as they are stored, in float16; by core WGSL, so that no device feature is needed.

alias Pair = u32;

fn pair_of(values: vec2<f32>) -> Pair {
    return pack2x16float(values);
}
