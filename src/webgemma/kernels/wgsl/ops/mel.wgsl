// mel[frame, bin] = log(sum over k of |X[k]| filter[bin, k] + FLOOR), where X is the transform of FFT points of
// window * frame, a frame of FRAME samples every HOP; samples outside of the audio are zero. One workgroup per
// frame. The transform is computed in passes of radix four, four, four and eight: small sums round less than
// one long one. After each pass, ring[r, b] = sum over m of x[m B + b] w^(m B r) for the b < B and the
// r < FFT / B, where w = exp(-2 pi i / FFT).

struct Params {
    count: u32, // samples
}

override THREADS: u32;
override FRAME: u32;
override HOP: u32;
override BINS: u32;
override WIDEST: u32;

var<storage, read> samples: array<f32>;
var<storage, read> window: array<f32>;
var<storage, read> roots: array<vec2<f32>>; // the powers of w
var<storage, read> filters: array<vec2<u32>>; // of a bin: its first k, how many
var<storage, read> weights: array<f32>; // WIDEST for each bin
var<storage, read_write> mel: array<f32>;

const FFT: u32 = 512u;
const POINTS: u32 = FFT / 2u + 1u; // values of k; the others mirror them
const FLOOR: f32 = 0.001;

var<workgroup> rings: array<vec2<f32>, 2u * FFT>; // what a pass reads, and what it writes
var<workgroup> magnitudes: array<f32, POINTS>;

fn complex_product(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
    return vec2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
}

// A value of the next ring, whose B is `stride`, from `radix` values of this one.
fn butterfly(ring: u32, i: u32, stride: u32, radix: u32) -> vec2<f32> {
    let r = i / stride;
    let line = stride * radix; // B of this ring
    let first = ring + r % (FFT / line) * line + i % stride;
    var sum = vec2(0.0);
    for (var c = 0u; c < radix; c++) {
        sum += complex_product(roots[c * r * stride % FFT], rings[first + c * stride]);
    }
    return sum;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    for (var i = thread; i < FFT; i += THREADS) {
        let at = i32(group.x * HOP + i) - i32(FRAME / 2u); // the first frame begins before the audio
        let inside = i < FRAME && at >= 0 && at < i32(params.count);
        let sample = samples[clamp(at, 0, i32(params.count) - 1)] * window[min(i, FRAME - 1u)];
        rings[i] = vec2(select(0.0, sample, inside), 0.0);
    }
    workgroupBarrier();
    var ring = 0u;
    for (var stride = FFT / 4u; stride >= 8u; stride /= 4u) {
        let next = FFT - ring;
        for (var i = thread; i < FFT; i += THREADS) {
            rings[next + i] = butterfly(ring, i, stride, 4u);
        }
        workgroupBarrier();
        ring = next;
    }
    for (var k = thread; k < POINTS; k += THREADS) {
        magnitudes[k] = length(butterfly(ring, k, 1u, 8u));
    }
    workgroupBarrier();
    for (var bin = thread; bin < BINS; bin += THREADS) {
        let triangle = filters[bin];
        var sum = FLOOR;
        for (var i = 0u; i < triangle.y; i++) {
            sum += magnitudes[triangle.x + i] * weights[bin * WIDEST + i];
        }
        mel[group.x * BINS + bin] = log(sum);
    }
}
