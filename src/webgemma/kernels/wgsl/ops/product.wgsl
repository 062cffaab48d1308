// c[m, n] = scale * sum over k of a(m, k) b(k, n), for each of the grid's z: a(m, k) is a[m, k], or a[k, m] if
// A_TRANSPOSED; b(k, n) is b[k, n], or b[n, k] if B_TRANSPOSED. A workgroup computes TILE_M by TILE_N, see
// outer_product. Rows are `outer` apart; with A_HEADS, B_HEADS or C_HEADS they are those of heads: `inner` of
// them are `step` apart, then begins the next token. Likewise the matrices along z. Or z are splits of k,
// split_k of it each, whose sums are matrices [m, n] of their own. In attention, a product is 0 where queries do not
// attend to keys: there a workgroup adds nothing up.
// uses: outer_product

struct Params {
    m: u32,
    n: u32,
    k_first: u32,
    k_end: u32,
    split_k: u32, // 0: k is not split
    z_inner: u32,
    add: u32, // 1: to what c holds
    scale: f32,
    group: u32, // queries of a token, if some of m, n and k are queries, from first_token on
    first_token: u32,
    window: u32,
    a_first: u32, a_inner: u32, a_outer: u32, a_step: u32, a_z_outer: u32, a_z_step: u32,
    b_first: u32, b_inner: u32, b_outer: u32, b_step: u32, b_z_outer: u32, b_z_step: u32,
    c_first: u32, c_inner: u32, c_outer: u32, c_step: u32, c_z_outer: u32, c_z_step: u32,
}

override THREADS: u32;
override TILE_M: u32;
override TILE_N: u32;
override EACH_M: u32;
override EACH_N: u32;
override SLICE: u32;
override A_TRANSPOSED: bool;
override B_TRANSPOSED: bool;
override A_HEADS: bool;
override B_HEADS: bool;
override C_HEADS: bool;
override MASK: u32; // 1: m are queries and k keys, 2: m are queries and n keys, 3: m are keys and k queries

var<storage, read> a: array<f32>;
var<storage, read> b: array<f32>;
var<storage, read_write> c: array<f32>;

// Division is slow: only rows of heads need it.
fn a_at(first: u32, row: u32) -> u32 {
    if (A_HEADS) {
        return first + row / params.a_inner * params.a_outer + row % params.a_inner * params.a_step;
    }
    return first + row * params.a_outer;
}

fn b_at(first: u32, row: u32) -> u32 {
    if (B_HEADS) {
        return first + row / params.b_inner * params.b_outer + row % params.b_inner * params.b_step;
    }
    return first + row * params.b_outer;
}

fn c_at(first: u32, row: u32) -> u32 {
    if (C_HEADS) {
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
fn left_index(item: u32) -> vec2<u32> {
    if (A_TRANSPOSED) {
        return vec2(item / M_VEC4S, item % M_VEC4S);
    }
    return vec2(item % SLICE, item / SLICE);
}

fn right_index(item: u32) -> vec2<u32> {
    if (B_TRANSPOSED) {
        return vec2(item % SLICE, item / SLICE);
    }
    return vec2(item / N_VEC4S, item % N_VEC4S);
}

fn left_value(tile: Tile, k: u32, m: u32) -> f32 {
    let own = min(tile.m + m, params.m - 1u);
    if (A_TRANSPOSED) {
        return a[a_at(tile.a_first, k) + own];
    }
    return a[a_at(tile.a_first, own) + k];
}

fn b_value(tile: Tile, k: u32, n: u32) -> f32 {
    let own = min(tile.n + n, params.n - 1u);
    if (B_TRANSPOSED) {
        return b[b_at(tile.b_first, own) + k];
    }
    return b[b_at(tile.b_first, k) + own];
}

fn left_staged(values: vec4<f32>, m: u32) -> vec4<f32> {
    return values;
}

const RIGHT_ITEMS: u32 = SLICE * N_VEC4S;

alias Fetched = vec4<f32>; // of n, a vec4 holds every N_VEC4S-th

fn fetch_right(tile: Tile, k: u32, item: u32) -> Fetched {
    let index = right_index(item);
    let own = min(k + index.x, tile.end - 1u);
    return vec4(
        b_value(tile, own, index.y),
        b_value(tile, own, index.y + N_VEC4S),
        b_value(tile, own, index.y + 2u * N_VEC4S),
        b_value(tile, own, index.y + 3u * N_VEC4S),
    );
}

fn stage_right(fetched: Fetched, buffer: u32, item: u32) {
    let index = right_index(item);
    right[right_at(buffer, index.x, index.y)] = fetched;
}

// The keys that some queries attend to: where they begin and end.
fn keys_of(first: u32, last: u32) -> vec2<u32> {
    let tokens = vec2(params.first_token) + vec2(first, last) / params.group + 1u;
    return vec2(tokens.x - min(tokens.x, params.window), tokens.y);
}

// The queries that attend to some keys; there are at most so many.
fn queries_of(first: u32, last: u32, most: u32) -> vec2<u32> {
    let tokens = max(vec2(first, last + params.window), vec2(params.first_token)) - params.first_token;
    return min(tokens, vec2(most)) * params.group;
}

// The k of a tile that are not all 0.
fn attended_k(m: u32, n: u32, begin: u32, end: u32) -> vec2<u32> {
    let last = min(m + TILE_M, params.m) - 1u;
    if (MASK == 1u) {
        let keys = keys_of(m, last);
        return vec2(max(begin, keys.x), min(end, keys.y));
    }
    if (MASK == 2u) {
        let keys = keys_of(m, last);
        return vec2(begin, select(begin, end, n < keys.y && n + TILE_N > keys.x));
    }
    if (MASK == 3u) {
        let queries = queries_of(m, last, params.k_end);
        return vec2(max(begin, queries.x), min(end, queries.y));
    }
    return vec2(begin, end);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let split = select(0u, group.z, params.split_k > 0u);
    let z = group.z - split;
    let z_outer = z / params.z_inner;
    let z_step = z % params.z_inner;
    let a_first = params.a_first + z_outer * params.a_z_outer + z_step * params.a_z_step;
    let b_first = params.b_first + z_outer * params.b_z_outer + z_step * params.b_z_step;
    let split_first = split * params.m * params.n;
    let c_first = params.c_first + z_outer * params.c_z_outer + z_step * params.c_z_step + split_first;
    let k_first = params.k_first + split * params.split_k;
    let k_end = min(params.k_end, select(params.k_end, k_first + params.split_k, params.split_k > 0u));
    let m_first = group.y * TILE_M;
    let n_first = group.x * TILE_N;
    let k = attended_k(m_first, n_first, k_first, k_end);
    let tile = Tile(k.x, k.y, a_first, b_first, m_first, n_first);
    var sums: Sums;
    if (k.x < k.y) {
        add_up(&sums, tile, thread);
    }
    if (params.add == 1u) { // all is read before anything is written, so that nothing waits in between
        for (var i = 0u; i < 4u * EACH_M; i++) {
            let line = c_at(c_first, min(tile.m + sum_m(thread, i), params.m - 1u));
            for (var j = 0u; j < EACH_N; j++) {
                let n = tile.n + sum_n(thread, j);
                let before = vec4(
                    c[line + min(n, params.n - 1u)],
                    c[line + min(n + N_VEC4S, params.n - 1u)],
                    c[line + min(n + 2u * N_VEC4S, params.n - 1u)],
                    c[line + min(n + 3u * N_VEC4S, params.n - 1u)],
                );
                sums[i][j] = before + params.scale * sums[i][j];
            }
        }
    } else {
        for (var i = 0u; i < 4u * EACH_M; i++) {
            for (var j = 0u; j < EACH_N; j++) {
                sums[i][j] *= params.scale;
            }
        }
    }
    for (var i = 0u; i < 4u * EACH_M; i++) {
        let m = tile.m + sum_m(thread, i);
        let line = c_at(c_first, m);
        for (var j = 0u; j < 4u * EACH_N; j++) {
            let n = tile.n + sum_n(thread, j / 4u) + j % 4u * N_VEC4S;
            if (m < params.m && n < params.n) {
                c[line + n] = sums[i][j / 4u][j % 4u];
            }
        }
    }
}
