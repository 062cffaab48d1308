// A line of a picture made longer or shorter: each pixel is a sum of some of the line's, by `taps`, and
// rounded. With ALONG_X lines are rows, else columns. A thread makes a pixel.

struct Params {
    width: u32, // of the result
    height: u32,
    from_width: u32,
    most: u32, // taps of a pixel, at most
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> pixels: array<u32>; // red, green, blue and nothing, a byte each
@group(0) @binding(2) var<storage, read> taps: array<vec2<u32>>; // of a pixel of a line: the first, how many
@group(0) @binding(3) var<storage, read> weights: array<f32>; // `most` for each pixel of a line
@group(0) @binding(4) var<storage, read_write> result: array<u32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let x = group.x * THREADS + thread;
    let y = group.y;
    if (x >= params.width || y >= params.height) {
        return;
    }
    let pixel = select(y, x, ALONG_X == 1u); // of the line
    let tap = taps[pixel];
    var sum = vec4(0.0);
    for (var i = 0u; i < tap.y; i++) {
        let at = select(vec2(x, tap.x + i), vec2(tap.x + i, y), ALONG_X == 1u);
        sum += weights[pixel * params.most + i] * unpack4x8unorm(pixels[at.y * params.from_width + at.x]);
    }
    result[y * params.width + x] = pack4x8unorm(sum); // rounds, and holds between 0 and 255
}
