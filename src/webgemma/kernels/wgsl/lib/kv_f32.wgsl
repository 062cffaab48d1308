// The cache in float32, four values at a time.

alias KvFour = vec4<f32>;

fn unpack_kv(four: KvFour) -> vec4<f32> {
    return four;
}

fn pack_kv(four: vec4<f32>) -> KvFour {
    return four;
}
