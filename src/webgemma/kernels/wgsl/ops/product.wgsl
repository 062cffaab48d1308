// c[m, n] = scale * sum over k of a(m, k) b(k, n), for each of the grid's z: a(m, k) is a[m, k], or
// a[k, m] if A_TURNED; b(k, n) is b[k, n], or b[n, k] if B_TURNED. A workgroup computes TILE_M by
// TILE_N, see lib/outer.wgsl. Rows are `outer` apart; with A_HEADS, B_HEADS or C_HEADS they are those of
// heads: `inner` of them are `step` apart, then begins the next token. Likewise the matrices along z. Or
// z are shares of k, share_k of it each, whose sums are matrices [m, n] of their own.

struct Params {
    m: u32,
    n: u32,
    k_first: u32,
    k_end: u32,
    share_k: u32, // 0: k is not cut
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

// Division is slow: only rows of heads need it.
fn a_at(first: u32, row: u32) -> u32 {
    if (A_HEADS == 1u) {
        return first + row / params.a_inner * params.a_outer + row % params.a_inner * params.a_step;
    }
    return first + row * params.a_outer;
}

fn b_at(first: u32, row: u32) -> u32 {
    if (B_HEADS == 1u) {
        return first + row / params.b_inner * params.b_outer + row % params.b_inner * params.b_step;
    }
    return first + row * params.b_outer;
}

fn c_at(first: u32, row: u32) -> u32 {
    if (C_HEADS == 1u) {
        return first + row / params.c_inner * params.c_outer + row % params.c_inner * params.c_step;
    }
    return first + row * params.c_outer;
}

// Neighbouring threads read neighbouring values.
fn stage_a(first: u32, m_first: u32, k_first: u32, k_end: u32, thread: u32) {
    for (var item = thread; item < SLICE * M_FOURS; item += THREADS) {
        var values = vec4(0.0);
        if (A_TURNED == 1u) {
            let k = item / M_FOURS;
            let m = m_first + 4u * (item % M_FOURS);
            let at = a_at(first, k_first + k) + m;
            for (var i = 0u; i < 4u; i++) {
                if (m + i < params.m && k_first + k < k_end) {
                    values[i] = a[at + i];
                }
            }
            left[left_at(k, item % M_FOURS)] = values;
        } else {
            let k = item % SLICE;
            let m = m_first + 4u * (item / SLICE);
            for (var i = 0u; i < 4u; i++) {
                if (m + i < params.m && k_first + k < k_end) {
                    values[i] = a[a_at(first, m + i) + k_first + k];
                }
            }
            left[left_at(k, item / SLICE)] = values;
        }
    }
}

fn stage_b(first: u32, n_first: u32, k_first: u32, k_end: u32, thread: u32) {
    for (var item = thread; item < SLICE * N_FOURS; item += THREADS) {
        var values = vec4(0.0);
        if (B_TURNED == 1u) {
            let k = item % SLICE;
            let n = n_first + 4u * (item / SLICE);
            for (var i = 0u; i < 4u; i++) {
                if (n + i < params.n && k_first + k < k_end) {
                    values[i] = b[b_at(first, n + i) + k_first + k];
                }
            }
            right[right_at(k, item / SLICE)] = values;
        } else {
            let k = item / N_FOURS;
            let n = n_first + 4u * (item % N_FOURS);
            let at = b_at(first, k_first + k) + n;
            for (var i = 0u; i < 4u; i++) {
                if (n + i < params.n && k_first + k < k_end) {
                    values[i] = b[at + i];
                }
            }
            right[right_at(k, item % N_FOURS)] = values;
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let p = params;
    let share = select(0u, group.z, p.share_k > 0u);
    let z = group.z - share;
    let z_outer = z / p.z_inner;
    let z_step = z % p.z_inner;
    let a_first = p.a_first + z_outer * p.a_z_outer + z_step * p.a_z_step;
    let b_first = p.b_first + z_outer * p.b_z_outer + z_step * p.b_z_step;
    let c_first = p.c_first + z_outer * p.c_z_outer + z_step * p.c_z_step + share * p.m * p.n;
    let k_first = p.k_first + share * p.share_k;
    let k_end = min(p.k_end, select(p.k_end, k_first + p.share_k, p.share_k > 0u));
    let m_first = group.y * TILE_M;
    let n_first = group.x * TILE_N;
    var sums: Sums;
    for (var k = k_first; k < k_end; k += SLICE) {
        workgroupBarrier();
        stage_a(a_first, m_first, k, k_end, thread);
        stage_b(b_first, n_first, k, k_end, thread);
        workgroupBarrier();
        add_slice(&sums, thread);
    }
    for (var i = 0u; i < 4u * EACH_M; i++) {
        let m = m_first + own_m(thread, i);
        if (m >= p.m) {
            continue;
        }
        let line = c_at(c_first, m);
        for (var j = 0u; j < 4u * EACH_N; j++) {
            let n = n_first + own_n(thread, j / 4u) + j % 4u;
            if (n < p.n) {
                let sum = p.scale * sums[i][j / 4u][j % 4u];
                c[line + n] = sum + select(0.0, c[line + n], p.add == 1u);
            }
        }
    }
}
