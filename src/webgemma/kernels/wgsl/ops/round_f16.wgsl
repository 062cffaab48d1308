// h[r] = y[r] / scale[r] in float16, where scale[r] is a power of two, see half_scale, and the slot `row_source` says
// what y is. One workgroup per row. The scales are float32, after the last row of h. With
// SPLIT, a row of h is followed by what its float16 leave of y, in float16 again.
// uses: batch=tokens workgroup_max half_scale row_source

struct Params {
    width: u32,
    rows: u32, // of h
    token_rows: u32, // rows of a token
}

override THREADS: u32;
override SPLIT: bool;

const PARTS: u32 = select(1u, 2u, SPLIT); // of a row of h

var<storage, read_write> h: array<u32>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group.y * groups.x + group.x;
    if (row >= batch.count * params.token_rows) {
        return;
    }
    let vec4s = params.width / 4u;
    let to = 2u * row * PARTS * vec4s;
    var peak = 0.0;
    for (var i = thread; i < vec4s; i += THREADS) {
        peak = max(peak, largest_of(source(row, i)));
    }
    let power = power_of(workgroup_max(peak, thread));
    for (var i = thread; i < vec4s; i += THREADS) {
        let values = source(row, i) * divisor_of(power);
        let halves = vec2(pack2x16float(values.xy), pack2x16float(values.zw));
        h[to + 2u * i] = halves.x;
        h[to + 2u * i + 1u] = halves.y;
        if (SPLIT) {
            let low = values - vec4(unpack2x16float(halves.x), unpack2x16float(halves.y));
            h[to + 2u * (vec4s + i)] = pack2x16float(low.xy);
            h[to + 2u * (vec4s + i) + 1u] = pack2x16float(low.zw);
        }
    }
    if (thread == 0u) {
        h[2u * params.rows * PARTS * vec4s + row] = power;
    }
}
