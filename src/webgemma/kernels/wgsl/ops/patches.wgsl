// p[t] = the pixels of patch t, all of its red ones, then green, then blue, row by row, times scale plus shift. A
// thread takes four pixels of a line of a patch.
// uses: batch=tokens

struct Params {
    columns: u32, // patches in a row of the image
    scale: f32, // of a colour from 0 to 1
    shift: f32,
}

override THREADS: u32 = 64u;
override SIDE: u32;

var<storage, read> pixels: array<u32>; // red, green, blue and nothing, a byte each
var<storage, read_write> p: array<vec4<f32>>;

const VEC4S: u32 = SIDE * SIDE / 4u; // of a colour of a patch

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.y;
    let i = group.x * THREADS + thread;
    if (t >= batch.count || i >= VEC4S) {
        return;
    }
    let y = t / params.columns * SIDE + 4u * i / SIDE;
    let at = (y * params.columns + t % params.columns) * SIDE + 4u * i % SIDE;
    let four_pixels = mat4x4<f32>(
        unpack4x8unorm(pixels[at]),
        unpack4x8unorm(pixels[at + 1u]),
        unpack4x8unorm(pixels[at + 2u]),
        unpack4x8unorm(pixels[at + 3u]),
    );
    let colours = transpose(four_pixels);
    for (var colour = 0u; colour < 3u; colour++) {
        p[(3u * t + colour) * VEC4S + i] = colours[colour] * params.scale + params.shift;
    }
}
