// sums[split, t] = scale * sum over the ids of a split of exp((logit[t, id] - top) / temperature) W[id]:
// what softmax(logits / temperature) W is made of, without the probabilities ever being stored. A
// workgroup computes TILE_M rows by TILE_N columns, SLICE ids at a time, see lib/outer.wgsl. Ids that no
// row of a tile gives a share worth adding are skipped. expect_sum adds up the splits.

struct Params {
    row_blocks: u32,
    plane1: u32,
    plane2: u32,
    first_row: u32, // id of the part's first row
    rows: u32,
    units: u32,
    vocab: u32,
    first: u32, // position of the first row of logits
    tokens: u32, // rows of logits
    split_rows: u32, // a multiple of SLICE
    first_split: u32,
    least: f32, // share, of the likeliest id's, that is worth adding
    scale: f32, // of the sums
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<uniform> denoising: Denoising;
@group(0) @binding(3) var<storage, read> logits: array<f32>; // [tokens, vocab]
@group(0) @binding(4) var<storage, read> findings: array<Finding>;
@group(0) @binding(5) var<storage, read_write> sums: array<vec4<f32>>; // [split, tokens, width / 4]

struct Tile {
    begin: u32, // of its rows
    end: u32,
    part: u32, // the first row of this part of W, as rows are counted
    unit: u32, // its first
    token: u32,
}

var<workgroup> tops: array<vec4<f32>, M_FOURS>; // of each row, the likeliest id's logit

fn top(t: u32) -> f32 {
    return findings[params.first + min(t, params.tokens - 1u)].top;
}

// Neighbouring threads read neighbouring logits.
fn left_place(item: u32) -> vec2<u32> {
    return vec2(item % SLICE, item / SLICE);
}

fn left_value(tile: Tile, id: u32, m: u32) -> f32 {
    return logits[min(tile.token + m, params.tokens - 1u) * params.vocab + params.first_row + id];
}

fn left_staged(four: vec4<f32>, m_four: u32) -> vec4<f32> {
    let shares = exp((four - tops[m_four]) * denoising.inverse_temperature);
    return select(shares, vec4(0.0), shares < vec4(params.least));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let begin = group.z * params.split_rows;
    let end = min(params.rows, begin + params.split_rows);
    let tile = Tile(begin, end, 0u, group.x * TILE_UNITS, group.y * TILE_M);
    for (var four = thread; four < M_FOURS; four += THREADS) {
        let t = tile.token + four;
        tops[four] = vec4(top(t), top(t + M_FOURS), top(t + 2u * M_FOURS), top(t + 3u * M_FOURS));
    }
    workgroupBarrier();
    var own: Sums;
    sum_up(&own, tile, thread);
    let fours = params.units * UNIT_FOURS;
    for (var i = 0u; i < 4u * EACH_M; i++) {
        let t = tile.token + own_m(thread, i);
        for (var j = 0u; j < EACH_N; j++) {
            let four = group.x * N_FOURS + own_four(thread, j);
            if (t < params.tokens && four < fours) {
                let at = ((params.first_split + group.z) * params.tokens + t) * fours + four;
                sums[at] = params.scale * own[i][j];
            }
        }
    }
}
