// integer_product: 32 weights times a group of 32 activations, both as integers.
//
// x = scale * v in groups of 32 values. A group holds the v of its first and of its last sixteen: all high
// bytes, then with BYTES 2 all low ones. Then the scale, and the sum of x over each sixteen. group_place says where
// these vec4s are.
// uses: integer_width group_place format

struct Sixteen {
    high: vec4<u32>, // all of it, with BYTES 1
    low: vec4<u32>,
    scale: f32,
    sum: f32,
}

// 32 weights: scale * q + offset, q signed bytes. Where one scale serves all (SCALED is 32), only the first
// of either is used, and no offset unless there are OFFSETS.
struct Weights {
    first: vec4<u32>, // sixteen q
    last: vec4<u32>,
    sizes: vec4<f32>, // the scales of both sixteens, then their offsets
}

fn add_dot(sum: i32, a: vec4<u32>, b: vec4<u32>) -> i32 {
    return sum + dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y)
        + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w);
}

// q v over sixteen, exactly: below 2^27.
fn dot_sixteen(q: vec4<u32>, v: Sixteen) -> i32 {
    let high = add_dot(0, q, v.high);
    if (BYTES == 1u) {
        return high;
    }
    return 256 * high + add_dot(0, q, v.low);
}

// q v over both sixteens, exactly: below 2^28.
fn dot_group(w: Weights, a: Sixteen, b: Sixteen) -> i32 {
    let high = add_dot(add_dot(0, w.first, a.high), w.last, b.high);
    if (BYTES == 1u) {
        return high;
    }
    return 256 * high + add_dot(add_dot(0, w.first, a.low), w.last, b.low);
}

fn integer_product(w: Weights, a: Sixteen, b: Sixteen) -> f32 {
    if (SCALED == 32u) {
        let scaled = w.sizes.x * (a.scale * f32(dot_group(w, a, b)));
        if (OFFSETS) {
            return scaled + w.sizes.z * (a.sum + b.sum);
        }
        return scaled;
    }
    let dots = vec2(f32(dot_sixteen(w.first, a)), f32(dot_sixteen(w.last, b)));
    let scaled = a.scale * (w.sizes.x * dots.x + w.sizes.y * dots.y);
    if (OFFSETS) {
        return scaled + w.sizes.z * a.sum + w.sizes.w * b.sum;
    }
    return scaled;
}
