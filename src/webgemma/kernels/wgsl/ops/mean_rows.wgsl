// mean[n] = the mean of the rows of text n. A thread takes four values of a text.
// uses: batch=tokens

struct Params {
    width: u32,
}

override THREADS: u32 = 64u;

var<storage, read> h: array<vec4<f32>>;
var<storage, read> texts: array<vec2<u32>>; // the first row of each, and the one after its last
var<storage, read_write> mean: array<vec4<f32>>;

const RUN: u32 = 32u; // rows whose sum is added to that of the others, so that long sums stay precise

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let n = group.y;
    let vec4s = params.width / 4u;
    let i = group.x * THREADS + thread;
    if (n >= batch.count || i >= vec4s) {
        return;
    }
    let text = texts[n];
    var sum = vec4(0.0);
    for (var first = text.x; first < text.y; first += RUN) {
        var part = vec4(0.0);
        for (var row = first; row < min(first + RUN, text.y); row++) {
            part += h[row * vec4s + i];
        }
        sum += part;
    }
    mean[n * vec4s + i] = sum / f32(text.y - text.x);
}
