// items = every token's (ordinal, id), those of a bin side by side, in any order within it; bins that top_k
// cuts off stay out. One workgroup for each CHUNK of tokens reserves its places in each bin at once.

struct Params {
    vocab: u32,
    parts: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> settings: Settings;
@group(0) @binding(2) var<storage, read> partials: array<Partial>;
@group(0) @binding(3) var<storage, read> values: array<vec2<f32>>; // changed, own
@group(0) @binding(4) var<storage, read_write> bins: array<atomic<u32>>; // tallies, then places taken
@group(0) @binding(5) var<storage, read_write> items: array<vec2<u32>>;

const NOWHERE: u32 = 0xffffffffu;

var<workgroup> firsts: array<u32, BINS>; // where each bin begins, then where this workgroup's part does
var<workgroup> counts: array<atomic<u32>, BINS>;

// firsts[i] = how many tokens the bins below i have.
fn find_firsts(thread: u32) {
    let mine = atomicLoad(&bins[thread]);
    firsts[thread] = mine;
    for (var step = 1u; step < BINS; step *= 2u) {
        workgroupBarrier();
        var sum = firsts[thread];
        if (thread >= step) {
            sum += firsts[thread - step];
        }
        workgroupBarrier();
        firsts[thread] = sum;
    }
    firsts[thread] -= mine;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    atomicStore(&counts[thread], 0u);
    find_firsts(thread);
    let best = best_changed(params.parts, thread).value;
    let needed = select(settings.top_k, params.vocab, settings.top_k == 0u);
    let first = group.x * CHUNK + thread;
    var places: array<u32, CHUNK / THREADS>;
    for (var i = 0u; i < CHUNK / THREADS; i++) {
        let id = first + i * THREADS;
        places[i] = NOWHERE;
        if (id < params.vocab) {
            let bin = bin_of(values[id].x, best);
            if (firsts[bin] < needed) {
                places[i] = atomicAdd(&counts[bin], 1u);
            }
        }
    }
    workgroupBarrier();
    let count = atomicLoad(&counts[thread]);
    if (count > 0u) {
        firsts[thread] += atomicAdd(&bins[WORDS + thread], count);
    }
    workgroupBarrier();
    for (var i = 0u; i < CHUNK / THREADS; i++) {
        if (places[i] != NOWHERE) {
            let id = first + i * THREADS;
            let value = values[id].x;
            items[firsts[bin_of(value, best)] + places[i]] = vec2(ordinal(bitcast<u32>(value)), id);
        }
    }
}
