// store_whole: a row of h in float16, and its scale after the last row, as round_f16 leaves them.
// uses: row workgroup_max half_scale

struct Params {
    h_rows: u32,
}

var<storage, read_write> h: array<u32>;

fn store_whole(t: u32, values: Row, thread: u32) {
    var peak = 0.0;
    for (var each = 0u; each < SHARE; each++) {
        peak = max(peak, select(0.0, largest_of(values[each]), is_live(each, thread)));
    }
    let power = power_of(workgroup_max(peak, thread));
    for (var each = 0u; each < SHARE; each++) {
        if (is_live(each, thread)) {
            let divided = values[each] * divisor_of(power);
            let to = 2u * (t * VEC4S + column_of(each, thread));
            h[to] = pack2x16float(divided.xy);
            h[to + 1u] = pack2x16float(divided.zw);
        }
    }
    if (thread == 0u) {
        h[2u * params.h_rows * VEC4S + t] = power;
    }
}
