// store_whole: a row of h, in float32.
// uses: row

var<storage, read_write> h: array<vec4<f32>>;

fn store_whole(t: u32, values: Row, thread: u32) {
    for (var each = 0u; each < SHARE; each++) {
        if (is_live(each, thread)) {
            h[t * VEC4S + column_of(each, thread)] = values[each];
        }
    }
}
