// Gathers a batch by expert: `places` lists every (t, slot), as t * used + slot, those of the first expert
// first; tiles[i] = (expert, begin, end, 0) are up to TOKENS entries of it that ask the same expert. Tiles
// left over are empty. One workgroup for all. The order within an expert may vary; no result depends on it.

struct Params {
    experts: u32,
    used: u32,
    tiles: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> ids: array<u32>;
@group(0) @binding(3) var<storage, read_write> places: array<u32>;
@group(0) @binding(4) var<storage, read_write> tiles: array<vec4<u32>>;

var<workgroup> counts: array<atomic<u32>, MOST_EXPERTS>;
var<workgroup> next: array<atomic<u32>, MOST_EXPERTS>; // where an expert's next entry goes

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    for (var expert = thread; expert < params.experts; expert += THREADS) {
        atomicStore(&counts[expert], 0u); // not every device begins with zeros
    }
    workgroupBarrier();
    let entries = state.count * params.used;
    for (var i = thread; i < entries; i += THREADS) {
        atomicAdd(&counts[ids[i]], 1u);
    }
    workgroupBarrier();
    for (var expert = thread; expert < params.experts; expert += THREADS) {
        var begin = 0u;
        var tile = 0u;
        for (var e = 0u; e < expert; e++) {
            let count = atomicLoad(&counts[e]);
            begin += count;
            tile += (count + TOKENS - 1u) / TOKENS;
        }
        atomicStore(&next[expert], begin);
        let end = begin + atomicLoad(&counts[expert]);
        for (; begin < end; begin += TOKENS) {
            tiles[tile] = vec4(expert, begin, min(begin + TOKENS, end), 0u);
            tile++;
        }
        if (expert == params.experts - 1u) {
            for (; tile < params.tiles; tile++) {
                tiles[tile] = vec4(0u);
            }
        }
    }
    workgroupBarrier();
    for (var i = thread; i < entries; i += THREADS) {
        places[atomicAdd(&next[ids[i]], 1u)] = i;
    }
}
