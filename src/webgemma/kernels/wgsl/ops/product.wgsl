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

struct Tile {
    begin: u32, // of its k
    end: u32,
    a_first: u32,
    b_first: u32,
    m: u32, // its first
    n: u32,
}

// Neighbouring threads read neighbouring values.
fn left_place(item: u32) -> vec2<u32> {
    if (A_TURNED == 1u) {
        return vec2(item / M_FOURS, item % M_FOURS);
    }
    return vec2(item % SLICE, item / SLICE);
}

fn right_place(item: u32) -> vec2<u32> {
    if (B_TURNED == 1u) {
        return vec2(item % SLICE, item / SLICE);
    }
    return vec2(item / N_FOURS, item % N_FOURS);
}

fn left_value(tile: Tile, k: u32, m: u32) -> f32 {
    let own = min(tile.m + m, params.m - 1u);
    if (A_TURNED == 1u) {
        return a[a_at(tile.a_first, k) + own];
    }
    return a[a_at(tile.a_first, own) + k];
}

fn b_value(tile: Tile, k: u32, n: u32) -> f32 {
    let own = min(tile.n + n, params.n - 1u);
    if (B_TURNED == 1u) {
        return b[b_at(tile.b_first, own) + k];
    }
    return b[b_at(tile.b_first, k) + own];
}

fn left_staged(four: vec4<f32>, m_four: u32) -> vec4<f32> {
    return four;
}

const RIGHT_ITEMS: u32 = SLICE * N_FOURS;

alias Brought = vec4<f32>; // of n, a four holds every N_FOURS-th

fn bring_right(tile: Tile, k: u32, item: u32) -> Brought {
    let place = right_place(item);
    let own = min(k + place.x, tile.end - 1u);
    return vec4(
        b_value(tile, own, place.y),
        b_value(tile, own, place.y + N_FOURS),
        b_value(tile, own, place.y + 2u * N_FOURS),
        b_value(tile, own, place.y + 3u * N_FOURS),
    );
}

fn put_right(brought: Brought, buffer: u32, item: u32) {
    let place = right_place(item);
    right[right_at(buffer, place.x, place.y)] = brought;
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
    let tile = Tile(k_first, k_end, a_first, b_first, group.y * TILE_M, group.x * TILE_N);
    var sums: Sums;
    sum_up(&sums, tile, thread);
    if (p.add == 1u) { // all is read before anything is written, so that nothing waits in between
        for (var i = 0u; i < 4u * EACH_M; i++) {
            let line = c_at(c_first, min(tile.m + own_m(thread, i), p.m - 1u));
            for (var j = 0u; j < EACH_N; j++) {
                let n = tile.n + own_four(thread, j);
                let before = vec4(
                    c[line + min(n, p.n - 1u)],
                    c[line + min(n + N_FOURS, p.n - 1u)],
                    c[line + min(n + 2u * N_FOURS, p.n - 1u)],
                    c[line + min(n + 3u * N_FOURS, p.n - 1u)],
                );
                sums[i][j] = before + p.scale * sums[i][j];
            }
        }
    } else {
        for (var i = 0u; i < 4u * EACH_M; i++) {
            for (var j = 0u; j < EACH_N; j++) {
                sums[i][j] *= p.scale;
            }
        }
    }
    for (var i = 0u; i < 4u * EACH_M; i++) {
        let m = tile.m + own_m(thread, i);
        let line = c_at(c_first, m);
        for (var j = 0u; j < 4u * EACH_N; j++) {
            let n = tile.n + own_four(thread, j / 4u) + j % 4u * N_FOURS;
            if (m < p.m && n < p.n) {
                c[line + n] = sums[i][j / 4u][j % 4u];
            }
        }
    }
}
