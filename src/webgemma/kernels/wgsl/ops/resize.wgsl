// Lines of a picture made longer or shorter: each pixel is a sum of some of its line's, by `taps`, whole
// numbers that are divided by 2^BITS and rounded, so that every device makes the same pixels. With ALONG_X
// lines are rows, else columns. PACKED pixels have three bytes each, the others four. A thread makes a pixel.

struct Params {
    width: u32, // of the result
    height: u32,
    from_width: u32,
    most: u32, // taps of a pixel, at most
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> pixels: array<u32>; // red, green, blue, a byte each
@group(0) @binding(2) var<storage, read> taps: array<vec2<u32>>; // of a pixel of a line: the first, how many
@group(0) @binding(3) var<storage, read> weights: array<i32>; // `most` for each pixel of a line
@group(0) @binding(4) var<storage, read_write> result: array<u32>;

fn colours_of(pixel: u32) -> vec3<i32> {
    var word = pixels[select(pixel, 3u * pixel / 4u, PACKED == 1u)];
    if (PACKED == 1u) {
        let bits = 8u * (3u * pixel % 4u);
        word = word >> bits;
        if (bits > 8u) { // it goes on in the next word
            word |= pixels[3u * pixel / 4u + 1u] << (32u - bits);
        }
    }
    return vec3<i32>((vec3(word) >> vec3(0u, 8u, 16u)) & vec3(255u));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let x = group.x * THREADS + thread;
    let y = group.y;
    if (x >= params.width || y >= params.height) {
        return;
    }
    let pixel = select(y, x, ALONG_X == 1u); // of the line
    let tap = taps[pixel];
    var sum = vec3(i32(1u << (BITS - 1u)));
    for (var i = 0u; i < tap.y; i++) {
        let at = select(vec2(x, tap.x + i), vec2(tap.x + i, y), ALONG_X == 1u);
        sum += weights[pixel * params.most + i] * colours_of(at.y * params.from_width + at.x);
    }
    let colours = vec3<u32>(clamp(sum >> vec3(BITS), vec3(0), vec3(255)));
    result[y * params.width + x] = colours.x | (colours.y << 8u) | (colours.z << 16u);
}
