// h[t] = x[t] / scale[t] in float16, where scale[t] is the power of two that brings the largest value of the row
// between 2^14 and 2^15: float16 ends at 65504, and x does not. One workgroup per row. The scales are float32,
// after the last row of h.
// uses: batch=tokens workgroup_max

struct Params {
    width: u32,
    rows: u32, // of h
    token_rows: u32, // rows of a token
}

override THREADS: u32;

var<storage, read> x: array<vec4<f32>>;
var<storage, read_write> h: array<u32>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let t = group.y * groups.x + group.x;
    if (t >= batch.count * params.token_rows) {
        return;
    }
    let vec4s = params.width / 4u;
    var peak = 0.0;
    for (var i = thread; i < vec4s; i += THREADS) {
        let sizes = abs(x[t * vec4s + i]);
        peak = max(peak, max(max(sizes.x, sizes.y), max(sizes.z, sizes.w)));
    }
    peak = workgroup_max(peak, thread);
    // The exponent's bits make the power of two; a row below 2^-100 keeps fewer of its own.
    let exponent = max(bitcast<u32>(peak) >> 23u, 27u) - 14u;
    let inverse = bitcast<f32>((254u - exponent) << 23u);
    for (var i = thread; i < vec4s; i += THREADS) {
        let values = x[t * vec4s + i] * inverse;
        h[2u * (t * vec4s + i)] = pack2x16float(values.xy);
        h[2u * (t * vec4s + i) + 1u] = pack2x16float(values.zw);
    }
    if (thread == 0u) {
        h[2u * params.rows * vec4s + t] = exponent << 23u;
    }
}
