// c[m, n] = scale * sum over k of a(m, k) b(k, n), for each of the grid's z: a(m, k) is a[m, k], or
// a[k, m] if A_TURNED; b(k, n) is b[k, n], or b[n, k] if B_TURNED. A workgroup computes TILE_M by
// TILE_N, see lib/outer.wgsl. Rows may be those of heads: `inner` of them are `step` apart, then begins
// the next token, `outer` further; likewise the matrices along z.

struct Place {
    first: u32,
    inner: u32,
    outer: u32,
    step: u32,
    z_outer: u32,
    z_step: u32,
}

struct Params {
    m: u32,
    n: u32,
    k_first: u32,
    k_end: u32,
    z_inner: u32,
    add: u32, // 1: to what c holds
    scale: f32,
    a_first: u32, a_inner: u32, a_outer: u32, a_step: u32, a_z_outer: u32, a_z_step: u32,
    b_first: u32, b_inner: u32, b_outer: u32, b_step: u32, b_z_outer: u32, b_z_step: u32,
    c_first: u32, c_inner: u32, c_outer: u32, c_step: u32, c_z_outer: u32, c_z_step: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> a: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<f32>;
@group(0) @binding(3) var<storage, read_write> c: array<f32>;

fn at(place: Place, z: u32, row: u32) -> u32 {
    let matrix = z / params.z_inner * place.z_outer + z % params.z_inner * place.z_step;
    return place.first + matrix + row / place.inner * place.outer + row % place.inner * place.step;
}

fn stage_a(place: Place, z: u32, m_first: u32, k_first: u32, thread: u32) {
    for (var item = thread; item < SLICE * M_FOURS; item += THREADS) {
        // neighbouring threads read neighbouring values
        let turned = A_TURNED == 1u;
        let k = select(item % SLICE, item / M_FOURS, turned);
        let four = select(item / SLICE, item % M_FOURS, turned);
        let m = m_first + 4u * four;
        var values = vec4(0.0);
        for (var i = 0u; i < 4u; i++) {
            if (m + i < params.m && k_first + k < params.k_end) {
                if (turned) {
                    values[i] = a[at(place, z, k_first + k) + m + i];
                } else {
                    values[i] = a[at(place, z, m + i) + k_first + k];
                }
            }
        }
        left[left_at(k, four)] = values;
    }
}

fn stage_b(place: Place, z: u32, n_first: u32, k_first: u32, thread: u32) {
    for (var item = thread; item < SLICE * N_FOURS; item += THREADS) {
        let turned = B_TURNED == 1u;
        let k = select(item / N_FOURS, item % SLICE, turned);
        let four = select(item % N_FOURS, item / SLICE, turned);
        let n = n_first + 4u * four;
        var values = vec4(0.0);
        for (var i = 0u; i < 4u; i++) {
            if (n + i < params.n && k_first + k < params.k_end) {
                if (turned) {
                    values[i] = b[at(place, z, n + i) + k_first + k];
                } else {
                    values[i] = b[at(place, z, k_first + k) + n + i];
                }
            }
        }
        right[right_at(k, four)] = values;
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let p = params;
    let a_place = Place(p.a_first, p.a_inner, p.a_outer, p.a_step, p.a_z_outer, p.a_z_step);
    let b_place = Place(p.b_first, p.b_inner, p.b_outer, p.b_step, p.b_z_outer, p.b_z_step);
    let c_place = Place(p.c_first, p.c_inner, p.c_outer, p.c_step, p.c_z_outer, p.c_z_step);
    let m_first = group.y * TILE_M;
    let n_first = group.x * TILE_N;
    var sums: Sums;
    for (var k = p.k_first; k < p.k_end; k += SLICE) {
        workgroupBarrier();
        stage_a(a_place, group.z, m_first, k, thread);
        stage_b(b_place, group.z, n_first, k, thread);
        workgroupBarrier();
        add_slice(&sums, thread);
    }
    for (var i = 0u; i < 4u * EACH_M; i++) {
        let m = m_first + own_m(thread, i);
        if (m >= p.m) {
            continue;
        }
        let line = at(c_place, group.z, m);
        for (var j = 0u; j < 4u * EACH_N; j++) {
            let n = n_first + own_n(thread, j / 4u) + j % 4u;
            if (n < p.n) {
                let sum = p.scale * sums[i][j / 4u][j % 4u];
                c[line + n] = sum + select(0.0, c[line + n], p.add == 1u);
            }
        }
    }
}
