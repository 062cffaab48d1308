// Sorts a batch by expert: `slots` lists every (t, slot), as t * used + slot, those of the first expert first;
// tiles[i] = (expert, begin, end, 0) are up to TOKENS entries of it with the same expert. Tiles left over are
// empty. One workgroup for all. The order within an expert may vary; no result depends on it.
// uses: batch=tokens

struct Params {
    experts: u32,
    used: u32,
    tile_count: u32,
}

override THREADS: u32 = 64u;
override TOKENS: u32;
override MAX_EXPERTS: u32;

var<storage, read> ids: array<u32>;
var<storage, read_write> slots: array<u32>;
var<storage, read_write> tiles: array<vec4<u32>>;

var<workgroup> counts: array<atomic<u32>, MAX_EXPERTS>;
var<workgroup> next: array<atomic<u32>, MAX_EXPERTS>; // where an expert's next entry goes

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    for (var expert = thread; expert < params.experts; expert += THREADS) {
        atomicStore(&counts[expert], 0u); // not every device begins with zeros
    }
    workgroupBarrier();
    let entries = batch.count * params.used;
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
            for (; tile < params.tile_count; tile++) {
                tiles[tile] = vec4(0u);
            }
        }
    }
    workgroupBarrier();
    for (var i = thread; i < entries; i += THREADS) {
        slots[atomicAdd(&next[ids[i]], 1u)] = i;
    }
}
