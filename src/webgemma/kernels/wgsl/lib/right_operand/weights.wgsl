// fetch_right, stage_right: SLICE rows of W by TILE_N columns for outer_product, a unit at a time; where
// threads would be left over, several decode a part of it each, those of the same part side by side. What is
// on its way is undecoded, so that nothing waits for it.
// uses: format

struct Params {
    units: u32, // of a row
}

override THREADS: u32;
override TILE_N: u32;
override SLICE: u32;

const UNIT_VEC4S: u32 = UNIT / 4u;
const TILE_UNITS: u32 = TILE_N / UNIT;
const W_UNITS: u32 = SLICE * TILE_UNITS;
const W_PARTS: u32 = clamp(THREADS / W_UNITS, 1u, 4u);
const W_THREADS: u32 = max(W_UNITS, THREADS / W_PARTS); // of a part, or more
const PART_VEC4S: u32 = UNIT_VEC4S / W_PARTS;
const RIGHT_ITEMS: u32 = W_THREADS * (W_PARTS - 1u) + W_UNITS;

const_assert TILE_UNITS * UNIT == TILE_N && PART_VEC4S * W_PARTS == UNIT_VEC4S;

alias Fetched = Words;

fn fetch_right(tile: Tile, k: u32, item: u32) -> Fetched {
    let own = min(item % W_THREADS, W_UNITS - 1u);
    let row = min(k + own / TILE_UNITS, tile.end - 1u);
    return words_of(row - tile.part, min(tile.unit + own % TILE_UNITS, params.units - 1u));
}

fn stage_right(fetched: Fetched, buffer: u32, item: u32) {
    let own = item % W_THREADS;
    let at = right_at(buffer, own / TILE_UNITS, own % TILE_UNITS * UNIT_VEC4S);
    for (var part = 0u; part < W_PARTS; part++) { // each thread its own part: the rest is never computed
        if (own < W_UNITS && part == item / W_THREADS) {
            var weights = weights_of(fetched);
            for (var i = part * PART_VEC4S; i < (part + 1u) * PART_VEC4S; i++) {
                right[at + i] = weights[i];
            }
        }
    }
}
