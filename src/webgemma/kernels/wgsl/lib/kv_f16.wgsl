// The cache in float16, packed by core WGSL so that no device feature is needed; four values at a time.

alias KvFour = vec2<u32>;

fn unpack_kv(four: KvFour) -> vec4<f32> {
    return vec4(unpack2x16float(four.x), unpack2x16float(four.y));
}

fn pack_kv(four: vec4<f32>) -> KvFour {
    return vec2(pack2x16float(four.xy), pack2x16float(four.zw));
}
