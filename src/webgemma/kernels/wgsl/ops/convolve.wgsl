// y[t, f] = relu(layer_norm(c)), c = sum over i and j of W[i, j] x[2 t + i - 1, 2 f + j - 1]: 3 x 3 of IN
// channels become 32, every second place in time and in bins; zeros outside. One workgroup of 64 threads
// for each t: four channels at a time go through workgroup memory, and a thread sums four f, eight apart,
// of four of the 32.

struct Params {
    times: u32, // of x
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [times, 2 PLACES, IN]
@group(0) @binding(2) var<storage, read> W: array<vec4<f32>>; // [IN / 4, 9, 4, 32]
@group(0) @binding(3) var<storage, read> norm: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>; // [t, PLACES, 32]

const PLACES: u32 = 32u; // values of f
const OUT_FOURS: u32 = 8u;
const COLUMNS: u32 = 2u * PLACES + 1u; // of x that the places see, from the one before the first
const WEIGHTS: u32 = 9u * 4u * OUT_FOURS;

const_assert THREADS == OUT_FOURS * PLACES / 4u;

var<workgroup> x_tile: array<vec4<f32>, 3u * COLUMNS>;
var<workgroup> w_tile: array<vec4<f32>, WEIGHTS>;

fn load(t: u32, slice: u32, thread: u32) {
    for (var i = thread; i < 3u * COLUMNS; i += THREADS) {
        let time = 2u * t + i / COLUMNS - 1u; // before the beginning it wraps around, as the column does
        let column = i % COLUMNS - 1u;
        var four = vec4(0.0);
        if (time < params.times && column < 2u * PLACES) {
            four = x[(time * 2u * PLACES + column) * (IN / 4u) + slice];
        }
        x_tile[i] = four;
    }
    for (var i = thread; i < WEIGHTS; i += THREADS) {
        w_tile[i] = W[slice * WEIGHTS + i];
    }
}

// relu(layer_norm(c)) of four channels of a place; all channels of all places are in w_tile.
fn normed(place: u32, out_four: u32) -> vec4<f32> {
    var sum = vec4(0.0);
    for (var i = 0u; i < OUT_FOURS; i++) {
        sum += w_tile[place * OUT_FOURS + i];
    }
    let mean = vec4(dot(sum, vec4(1.0)) / f32(4u * OUT_FOURS));
    var squares = vec4(0.0);
    for (var i = 0u; i < OUT_FOURS; i++) {
        let four = w_tile[place * OUT_FOURS + i] - mean;
        squares += four * four;
    }
    let scale = inverseSqrt(dot(squares, vec4(1.0)) / f32(4u * OUT_FOURS) + params.eps);
    let four = w_tile[place * OUT_FOURS + out_four] - mean;
    return max(vec4(0.0), four * scale * norm[out_four]);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let out_four = thread % OUT_FOURS;
    let place = thread / OUT_FOURS; // and every eighth after it
    var sums: array<vec4<f32>, 4>;
    for (var slice = 0u; slice < IN / 4u; slice++) {
        workgroupBarrier();
        load(group.x, slice, thread);
        workgroupBarrier();
        for (var tap = 0u; tap < 9u; tap++) {
            let at = 4u * tap * OUT_FOURS + out_four;
            let w = mat4x4<f32>(
                w_tile[at],
                w_tile[at + OUT_FOURS],
                w_tile[at + 2u * OUT_FOURS],
                w_tile[at + 3u * OUT_FOURS],
            );
            let corner = tap / 3u * COLUMNS + tap % 3u + 2u * place;
            for (var i = 0u; i < 4u; i++) {
                sums[i] += w * x_tile[corner + 16u * i];
            }
        }
    }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
        w_tile[(place + 8u * i) * OUT_FOURS + out_four] = sums[i];
    }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
        let f = place + 8u * i;
        y[(group.x * PLACES + f) * OUT_FOURS + out_four] = normed(f, out_four);
    }
}
