// y[t, f] = relu(layer_norm(c)), c = sum over i and j of W[i, j] x[2 t + i - 1, 2 f + j - 1]: 3 x 3 of IN channels
// become 32, with a stride of two in time and in bins; zeros outside. One workgroup of 64 threads for each t:
// four channels at a time go through workgroup memory, and a thread sums four f, eight apart, of four of the
// 32 output channels.
// uses: clamped

struct Params {
    times: u32, // of x
    eps: f32,
}

override THREADS: u32 = 64u;
override IN: u32;

var<storage, read> x: array<vec4<f32>>; // [times, 2 COLUMNS, IN]
var<storage, read> W: array<vec4<f32>>; // [IN / 4, 9, 4, 32]
var<storage, read> norm: array<vec4<f32>>;
var<storage, read_write> y: array<vec4<f32>>; // [t, COLUMNS, 32]

const COLUMNS: u32 = 32u; // values of f
const OUT_VEC4S: u32 = 8u;
const IN_COLUMNS: u32 = 2u * COLUMNS + 1u; // of x, from the one before the first
const WEIGHTS: u32 = 9u * 4u * OUT_VEC4S;

const_assert THREADS == OUT_VEC4S * COLUMNS / 4u;

var<workgroup> x_tile: array<vec4<f32>, 3u * IN_COLUMNS>;
var<workgroup> w_tile: array<vec4<f32>, WEIGHTS>;

fn load(t: u32, slice: u32, thread: u32) {
    for (var i = thread; i < 3u * IN_COLUMNS; i += THREADS) {
        let time = 2u * t + i / IN_COLUMNS - 1u; // before the beginning it wraps around, as the column does
        let column = i % IN_COLUMNS - 1u;
        var values = vec4(0.0);
        if (time < params.times && column < 2u * COLUMNS) {
            values = x[(time * 2u * COLUMNS + column) * (IN / 4u) + slice];
        }
        x_tile[i] = values;
    }
    for (var i = thread; i < WEIGHTS; i += THREADS) {
        w_tile[i] = W[slice * WEIGHTS + i];
    }
}

// relu(layer_norm(c)) of four channels of a column; all channels of all columns are in w_tile.
fn normed(column: u32, out: u32) -> vec4<f32> {
    var sum = vec4(0.0);
    for (var i = 0u; i < OUT_VEC4S; i++) {
        sum += w_tile[column * OUT_VEC4S + i];
    }
    let mean = vec4(dot(sum, vec4(1.0)) / f32(4u * OUT_VEC4S));
    var squares = vec4(0.0);
    for (var i = 0u; i < OUT_VEC4S; i++) {
        let values = w_tile[column * OUT_VEC4S + i] - mean;
        squares += values * values;
    }
    let scale = inverseSqrt(dot(squares, vec4(1.0)) / f32(4u * OUT_VEC4S) + params.eps);
    let values = w_tile[column * OUT_VEC4S + out] - mean;
    let normed = values * scale * norm[out];
    return select(max(vec4(0.0), normed), normed, is_nan4(normed));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let out = thread % OUT_VEC4S;
    let column = thread / OUT_VEC4S; // and every eighth after it
    var sums: array<vec4<f32>, 4>;
    for (var slice = 0u; slice < IN / 4u; slice++) {
        workgroupBarrier();
        load(group.x, slice, thread);
        workgroupBarrier();
        for (var tap = 0u; tap < 9u; tap++) {
            let at = 4u * tap * OUT_VEC4S + out;
            let w = mat4x4<f32>(
                w_tile[at],
                w_tile[at + OUT_VEC4S],
                w_tile[at + 2u * OUT_VEC4S],
                w_tile[at + 3u * OUT_VEC4S],
            );
            let corner = tap / 3u * IN_COLUMNS + tap % 3u + 2u * column;
            for (var i = 0u; i < 4u; i++) {
                sums[i] += w * x_tile[corner + 16u * i];
            }
        }
    }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
        w_tile[(column + 8u * i) * OUT_VEC4S + out] = sums[i];
    }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
        let f = column + 8u * i;
        y[(group.x * COLUMNS + f) * OUT_VEC4S + out] = normed(f, out);
    }
}
