// y[t, f] = relu(layer_norm(c)), c = sum over i and j of W[i, j] mel[2 t + i - 1, 2 f + j - 1]: 3 x 3 of one channel
// become CHANNELS, with a stride of two in time and in bins; zeros outside. One workgroup for each t and f,
// whose threads keep their vec4s of the channels.
// uses: workgroup_sum clamped

struct Params {
    frames: u32, // of mel
    bins: u32,
    eps: f32,
}

override THREADS: u32;
override CHANNELS: u32;

var<storage, read> mel: array<f32>; // [frames, bins]
var<storage, read> W: array<vec4<f32>>; // [9, CHANNELS]
var<storage, read> norm: array<vec4<f32>>;
var<storage, read_write> y: array<vec4<f32>>; // [t, f, CHANNELS]

const VEC4S: u32 = CHANNELS / 4u;
const EACH: u32 = VEC4S / THREADS;

const_assert EACH * THREADS == VEC4S;

// Zero outside; before the beginning, the number has wrapped around.
fn mel_at(frame: u32, bin: u32) -> f32 {
    let inside = frame < params.frames && bin < params.bins;
    return select(0.0, mel[select(0u, frame * params.bins + bin, inside)], inside);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    var sums: array<vec4<f32>, EACH>;
    for (var tap = 0u; tap < 9u; tap++) {
        let value = mel_at(2u * group.y + tap / 3u - 1u, 2u * group.x + tap % 3u - 1u);
        for (var each = 0u; each < EACH; each++) {
            sums[each] += W[tap * VEC4S + each * THREADS + thread] * value;
        }
    }
    var sum = 0.0;
    for (var each = 0u; each < EACH; each++) {
        sum += dot(sums[each], vec4(1.0));
    }
    let mean = workgroup_sum(sum, thread) / f32(CHANNELS);
    var squares = 0.0;
    for (var each = 0u; each < EACH; each++) {
        sums[each] -= vec4(mean);
        squares += dot(sums[each], sums[each]);
    }
    let scale = inverseSqrt(workgroup_sum(squares, thread) / f32(CHANNELS) + params.eps);
    let at = (group.y * groups.x + group.x) * VEC4S;
    for (var each = 0u; each < EACH; each++) {
        let column = each * THREADS + thread;
        let normed = sums[each] * scale * norm[column];
        y[at + column] = select(max(vec4(0.0), normed), normed, is_nan4(normed));
    }
}
