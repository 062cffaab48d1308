// Row: a row of WIDTH values in the registers of a workgroup, SHARE vec4s for each of its THREADS threads; beyond the
// end of the row, zeros. inverse_root: 1 / rms of a row.
// uses: workgroup_sum

struct Params {
    eps: f32,
}

override THREADS: u32;
override WIDTH: u32;

const VEC4S: u32 = WIDTH / 4u;
const SHARE: u32 = (VEC4S + THREADS - 1u) / THREADS;

alias Row = array<vec4<f32>, SHARE>;

fn column_of(each: u32, thread: u32) -> u32 {
    return min(each * THREADS + thread, VEC4S - 1u);
}

fn is_live(each: u32, thread: u32) -> bool {
    return each * THREADS + thread < VEC4S;
}

fn inverse_root(row: Row, thread: u32) -> f32 {
    var squares = 0.0;
    for (var each = 0u; each < SHARE; each++) {
        squares += dot(row[each], row[each]);
    }
    return inverseSqrt(workgroup_sum(squares, thread) / f32(WIDTH) + params.eps);
}
