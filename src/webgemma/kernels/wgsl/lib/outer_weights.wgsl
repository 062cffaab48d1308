// bring_right, put_right: SLICE rows of W by TILE_N columns for lib/outer.wgsl, a unit at a time; where
// threads would be left over, several decode a part of it each, those of the same part side by side.
// What is on its way is undecoded, so that nothing waits for it.

const UNIT_FOURS: u32 = UNIT / 4u;
const TILE_UNITS: u32 = TILE_N / UNIT;
const W_UNITS: u32 = SLICE * TILE_UNITS;
const W_PARTS: u32 = clamp(THREADS / W_UNITS, 1u, 4u);
const W_ROOM: u32 = max(W_UNITS, THREADS / W_PARTS); // threads of a part, or more
const PART_FOURS: u32 = UNIT_FOURS / W_PARTS;
const RIGHT_ITEMS: u32 = W_ROOM * (W_PARTS - 1u) + W_UNITS;

const_assert TILE_UNITS * UNIT == TILE_N && PART_FOURS * W_PARTS == UNIT_FOURS;

alias Brought = Words;

fn bring_right(tile: Tile, k: u32, item: u32) -> Brought {
    let own = min(item % W_ROOM, W_UNITS - 1u);
    let row = min(k + own / TILE_UNITS, tile.end - 1u);
    return words_of(row - tile.part, min(tile.unit + own % TILE_UNITS, params.units - 1u));
}

fn put_right(brought: Brought, buffer: u32, item: u32) {
    let own = item % W_ROOM;
    let at = right_at(buffer, own / TILE_UNITS, own % TILE_UNITS * UNIT_FOURS);
    for (var part = 0u; part < W_PARTS; part++) { // a part of its own: the rest is never computed
        if (own < W_UNITS && part == item / W_ROOM) {
            var weights = weights_of(brought);
            for (var i = part * PART_FOURS; i < (part + 1u) * PART_FOURS; i++) {
                right[at + i] = weights[i];
            }
        }
    }
}
