// The KV cache in float32, four values at a time.

alias KvVec4 = vec4<f32>;

fn unpack_kv(packed: KvVec4) -> vec4<f32> {
    return packed;
}

fn pack_kv(values: vec4<f32>) -> KvVec4 {
    return values;
}
