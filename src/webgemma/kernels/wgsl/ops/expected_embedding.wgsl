// sums[split, t] = scale * sum over the ids of a split of exp((logit[t, id] - top) / temperature) W[id]: what
// softmax(logits / temperature) W is made of, without the probabilities ever being stored. A workgroup
// computes TILE_M rows by TILE_N columns, SLICE ids at a time, see outer_product. Ids whose weight no row of a
// tile is changed by are skipped. expected_embedding_sum adds up the splits.
// uses: denoising position_stats outer_product right_operand format

struct Params {
    first_row: u32, // id of the part's first row
    rows: u32,
    units: u32,
    vocab: u32,
    first: u32, // position of the first row of logits
    tokens: u32, // rows of logits
    split_rows: u32, // a multiple of SLICE
    first_split: u32,
    min_weight: f32, // relative to the likeliest id's, below which an id is not added
    scale: f32, // of the sums
}

override THREADS: u32;
override TILE_M: u32;
override EACH_M: u32;
override EACH_N: u32;
override SLICE: u32;

var<storage, read> logits: array<f32>; // [tokens, vocab]
var<storage, read> stats: array<PositionStats>;
var<storage, read_write> sums: array<vec4<f32>>; // [split, tokens, width / 4]

struct Tile {
    begin: u32, // of its rows
    end: u32,
    part: u32, // the first row of this part of W, as rows are counted
    unit: u32, // its first
    token: u32,
}

var<workgroup> tops: array<vec4<f32>, M_VEC4S>; // of each row, the likeliest id's logit

fn top(t: u32) -> f32 {
    return stats[params.first + min(t, params.tokens - 1u)].top;
}

// Neighbouring threads read neighbouring logits.
fn left_index(item: u32) -> vec2<u32> {
    return vec2(item % SLICE, item / SLICE);
}

fn left_value(tile: Tile, id: u32, m: u32) -> f32 {
    return logits[min(tile.token + m, params.tokens - 1u) * params.vocab + params.first_row + id];
}

fn left_staged(values: vec4<f32>, m: u32) -> vec4<f32> {
    let weights = exp((values - tops[m]) * denoising.inverse_temperature);
    return select(weights, vec4(0.0), weights < vec4(params.min_weight));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let begin = group.z * params.split_rows;
    let end = min(params.rows, begin + params.split_rows);
    let tile = Tile(begin, end, 0u, group.x * TILE_UNITS, group.y * TILE_M);
    for (var i = thread; i < M_VEC4S; i += THREADS) {
        let t = tile.token + i;
        tops[i] = vec4(top(t), top(t + M_VEC4S), top(t + 2u * M_VEC4S), top(t + 3u * M_VEC4S));
    }
    workgroupBarrier();
    var own: Sums;
    add_up(&own, tile, thread);
    let vec4s = params.units * UNIT_VEC4S;
    for (var i = 0u; i < 4u * EACH_M; i++) {
        let t = tile.token + sum_m(thread, i);
        for (var j = 0u; j < EACH_N; j++) {
            let column = group.x * N_VEC4S + sum_n(thread, j);
            if (t < params.tokens && column < vec4s) {
                let at = ((params.first_split + group.z) * params.tokens + t) * vec4s + column;
                sums[at] = params.scale * own[i][j];
            }
        }
    }
}
