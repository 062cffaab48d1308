// sums[split, t] = sum over the ids of a split of exp((logit[t, id] - top) / temperature) W[id]: what
// softmax(logits / temperature) W is made of, without the probabilities ever being stored. A
// workgroup computes TOKENS rows by COLUMNS columns, IDS ids at a time through workgroup memory; a
// thread sums four columns for EACH rows. expect_sum adds up the splits.

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
    split_rows: u32, // a multiple of IDS
    first_split: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<uniform> denoising: Denoising;
@group(0) @binding(3) var<storage, read> logits: array<f32>; // [tokens, vocab]
@group(0) @binding(4) var<storage, read> findings: array<Finding>;
@group(0) @binding(5) var<storage, read_write> sums: array<vec4<f32>>; // [split, tokens, width / 4]

const IDS: u32 = 32u;
const TOKENS: u32 = 64u;
const COLUMNS: u32 = 64u;
const ACROSS: u32 = COLUMNS / 4u; // threads along the columns
const DOWN: u32 = THREADS / ACROSS; // and along the rows
const EACH: u32 = TOKENS / DOWN;
const QUADS: u32 = EACH / 4u;
const UNIT_FOURS: u32 = UNIT / 4u;
const LINE_UNITS: u32 = COLUMNS / UNIT;

const_assert LINE_UNITS * UNIT == COLUMNS && 4u * QUADS * DOWN == TOKENS;

var<workgroup> w_tile: array<vec4<f32>, IDS * ACROSS>;
var<workgroup> e_tile: array<vec4<f32>, IDS * TOKENS / 4u>; // four rows at one id

fn load_weights(row: u32, end: u32, unit: u32, thread: u32) {
    for (var item = thread; item < IDS * LINE_UNITS; item += THREADS) {
        let line = item / LINE_UNITS;
        let own = unit + item % LINE_UNITS;
        var weights = array<vec4<f32>, UNIT_FOURS>(); // naga zeroes a bare `var` only once
        if (row + line < end && own < params.units) {
            weights = decode(row + line, own);
        }
        for (var i = 0u; i < UNIT_FOURS; i++) {
            w_tile[line * ACROSS + item % LINE_UNITS * UNIT_FOURS + i] = weights[i];
        }
    }
}

fn load_shares(row: u32, end: u32, token: u32, thread: u32) {
    for (var item = thread; item < IDS * TOKENS / 4u; item += THREADS) {
        let line = item % IDS;
        var four = vec4(0.0);
        for (var i = 0u; i < 4u; i++) {
            let t = token + item / IDS * 4u + i;
            if (row + line < end && t < params.tokens) {
                let logit = logits[t * params.vocab + params.first_row + row + line];
                let below = logit - findings[params.first + t].top;
                four[i] = exp(below * denoising.inverse_temperature);
            }
        }
        e_tile[line * TOKENS / 4u + item / IDS] = four;
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let token = group.y * TOKENS;
    let begin = group.z * params.split_rows;
    let end = min(params.rows, begin + params.split_rows);
    let across = thread % ACROSS;
    let down = thread / ACROSS;
    var sum: array<vec4<f32>, EACH>;
    for (var row = begin; row < end; row += IDS) {
        workgroupBarrier();
        load_weights(row, end, group.x * LINE_UNITS, thread);
        load_shares(row, end, token, thread);
        workgroupBarrier();
        for (var line = 0u; line < IDS; line++) {
            let w = w_tile[line * ACROSS + across];
            for (var quad = 0u; quad < QUADS; quad++) {
                let e = e_tile[line * TOKENS / 4u + down * QUADS + quad];
                sum[4u * quad] = fma(vec4(e.x), w, sum[4u * quad]);
                sum[4u * quad + 1u] = fma(vec4(e.y), w, sum[4u * quad + 1u]);
                sum[4u * quad + 2u] = fma(vec4(e.z), w, sum[4u * quad + 2u]);
                sum[4u * quad + 3u] = fma(vec4(e.w), w, sum[4u * quad + 3u]);
            }
        }
    }
    let fours = params.units * UNIT_FOURS;
    let column = group.x * ACROSS + across;
    for (var i = 0u; i < EACH; i++) {
        let t = token + down * EACH + i;
        if (t < params.tokens && column < fours) {
            sums[((params.first_split + group.z) * params.tokens + t) * fours + column] = sum[i];
        }
    }
}
