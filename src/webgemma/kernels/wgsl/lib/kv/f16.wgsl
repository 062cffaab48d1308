// The KV cache in float16, packed by core WGSL so that no device feature is needed; four values at a time.

alias KvVec4 = vec2<u32>;

fn unpack_kv(packed: KvVec4) -> vec4<f32> {
    return vec4(unpack2x16float(packed.x), unpack2x16float(packed.y));
}

fn pack_kv(values: vec4<f32>) -> KvVec4 {
    return vec2(pack2x16float(values.xy), pack2x16float(values.zw));
}
