// Q8_0: 32 weights are d * q, d a float16, q an int8. Planes: the q of all blocks (32 bytes each),
// then all d (2 bytes each).

const UNIT: u32 = 32u;

@group(0) @binding(1) var<storage, read> W: array<vec4<u32>>;

fn block_scale(block: u32) -> f32 {
    let at = params.plane1 + block / 2u; // in words
    return unpack2x16float(W[at / 4u][at % 4u])[block % 2u];
}

// q of a block, as signed bytes in order.
fn quants(block: u32) -> array<vec4<u32>, 2> {
    return array<vec4<u32>, 2>(W[2u * block], W[2u * block + 1u]);
}

fn decode(row: u32, unit: u32) -> array<vec4<f32>, 8> {
    let block = row * params.row_blocks + unit;
    let d = block_scale(block);
    let q = quants(block);
    var out: array<vec4<f32>, 8>;
    for (var i = 0u; i < 4u; i++) {
        out[i] = d * vec4<f32>(unpack4xI8(q[0][i]));
        out[i + 4u] = d * vec4<f32>(unpack4xI8(q[1][i]));
    }
    return out;
}
