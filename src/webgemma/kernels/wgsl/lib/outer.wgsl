// add_slice: what a slice of k adds to the sums of a tile, sum[m, n] += left[k, m] * right[k, n]. The op
// stages both slices in workgroup memory, fours along m and along n, `left_at` and `right_at` saying
// where. A thread sums 4 * EACH_M by 4 * EACH_N of the tile's TILE_M by TILE_N.

const M_FOURS: u32 = TILE_M / 4u;
const N_FOURS: u32 = TILE_N / 4u;
const ACROSS: u32 = N_FOURS / EACH_N; // threads along n
const DOWN: u32 = M_FOURS / EACH_M; // threads along m

const_assert ACROSS * DOWN == THREADS;

alias Sums = array<array<vec4<f32>, EACH_N>, 4u * EACH_M>; // of a thread: fours along n

// Lines are one longer than needed, so that neighbouring lines use other banks.
var<workgroup> left: array<vec4<f32>, SLICE * (M_FOURS + 1u)>;
var<workgroup> right: array<vec4<f32>, SLICE * (N_FOURS + 1u)>;

fn left_at(k: u32, m_four: u32) -> u32 {
    return k * (M_FOURS + 1u) + m_four;
}

fn right_at(k: u32, n_four: u32) -> u32 {
    return k * (N_FOURS + 1u) + n_four;
}

// Of the sums of a thread, where they stand in the tile.
fn own_m(thread: u32, i: u32) -> u32 {
    return 4u * (thread / ACROSS + i / 4u * DOWN) + i % 4u;
}

fn own_n(thread: u32, j: u32) -> u32 {
    return 4u * (thread % ACROSS + j * ACROSS);
}

fn add_slice(sums: ptr<function, Sums>, thread: u32) {
    for (var k = 0u; k < SLICE; k++) {
        var b: array<vec4<f32>, EACH_N>;
        for (var j = 0u; j < EACH_N; j++) {
            b[j] = right[right_at(k, thread % ACROSS + j * ACROSS)];
        }
        for (var i = 0u; i < EACH_M; i++) {
            let a = left[left_at(k, thread / ACROSS + i * DOWN)];
            for (var j = 0u; j < EACH_N; j++) {
                (*sums)[4u * i][j] = fma(vec4(a.x), b[j], (*sums)[4u * i][j]);
                (*sums)[4u * i + 1u][j] = fma(vec4(a.y), b[j], (*sums)[4u * i + 1u][j]);
                (*sums)[4u * i + 2u][j] = fma(vec4(a.z), b[j], (*sums)[4u * i + 2u][j]);
                (*sums)[4u * i + 3u][j] = fma(vec4(a.w), b[j], (*sums)[4u * i + 3u][j]);
            }
        }
    }
}
