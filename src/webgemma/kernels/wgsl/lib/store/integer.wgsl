// store_vec4: four values of a row of h, quantised in the groups that integer_dot reads; `index` counts
// vec4s. All threads of a workgroup call it together, eight neighbours for a group: index and thread agree
// modulo 8, and all eight are live or none is.
// uses: quantised group_place

alias Stored = u32;

fn store_vec4(index: u32, values: vec4<f32>, live: bool, thread: u32) {
    let q = quantised(values, thread);
    if (!live) {
        return;
    }
    let group = index / 8u;
    let j = index % 8u;
    h[4u * group_place(group, j / 4u) + j % 4u] = q.high;
    if (BYTES == 2u) {
        h[4u * group_place(group, 2u + j / 4u) + j % 4u] = q.low;
    }
    if (j == 0u) {
        let to = 4u * group_place(group, 2u * BYTES);
        h[to] = bitcast<u32>(q.scale);
        h[to + 1u] = bitcast<u32>(q.sums.x);
        h[to + 2u] = bitcast<u32>(q.sums.y);
        h[to + 3u] = 0u;
    }
}

// Four floats of h, which needs no other thread; `index` counts vec4s of floats.
fn store_floats(index: u32, values: vec4<f32>) {
    let words = bitcast<vec4<u32>>(values);
    for (var i = 0u; i < 4u; i++) {
        h[4u * index + i] = words[i];
    }
}
