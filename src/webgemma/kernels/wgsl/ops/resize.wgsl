// Lines of an image made longer or shorter: each pixel is a sum of some of its line's, by `taps`, whole numbers that
// are divided by 2^BITS and rounded, so that every device computes the same pixels. With ALONG_X lines are rows,
// else columns. PACKED pixels have three bytes each, the others four. A thread computes a pixel.

struct Params {
    width: u32, // of the result
    height: u32,
    from_width: u32,
    max_taps: u32, // of a pixel
}

override THREADS: u32;
override BITS: u32;
override ALONG_X: bool;
override PACKED: bool;

var<storage, read> pixels: array<u32>; // red, green, blue, a byte each
var<storage, read> taps: array<vec2<u32>>; // of a pixel of a line: the first, how many
var<storage, read> weights: array<i32>; // max_taps for each pixel of a line
var<storage, read_write> result: array<u32>;

fn colours_of(pixel: u32) -> vec3<i32> {
    var word = pixels[select(pixel, 3u * pixel / 4u, PACKED)];
    if (PACKED) {
        let bits = 8u * (3u * pixel % 4u);
        word = word >> bits;
        if (bits > 8u) { // it continues in the next word
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
    let pixel = select(y, x, ALONG_X); // of the line
    let tap = taps[pixel];
    var sum = vec3(i32(1u << (BITS - 1u)));
    for (var i = 0u; i < tap.y; i++) {
        let at = select(vec2(x, tap.x + i), vec2(tap.x + i, y), ALONG_X);
        sum += weights[pixel * params.max_taps + i] * colours_of(at.y * params.from_width + at.x);
    }
    let colours = vec3<u32>(clamp(sum >> vec3(BITS), vec3(0), vec3(255)));
    result[y * params.width + x] = colours.x | (colours.y << 8u) | (colours.z << 16u);
}
