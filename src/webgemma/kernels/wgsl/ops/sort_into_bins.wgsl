// items = every token's (ordinal, id), those of a bin side by side, in any order within it; bins that top_k cuts off
// are left out. One workgroup for each CHUNK of a row reserves its items in each bin at once.
// uses: batch=rows partials token_order sampling_settings

struct Params {
    vocab: u32,
    parts: u32, // chunks of the vocabulary
}

override THREADS: u32;
override CHUNK: u32;

var<storage, read> partials: array<Partial>;
var<storage, read> values: array<vec2<f32>>; // of each token of a row: penalised, own
var<storage, read_write> bins: array<atomic<u32>>; // tallies, then items reserved
var<storage, read_write> items: array<vec2<u32>>;

const LEFT_OUT: u32 = 0xffffffffu;

var<workgroup> firsts: array<u32, BINS>; // where each bin begins, then where this workgroup's part does
var<workgroup> counts: array<atomic<u32>, BINS>;

// firsts[i] = how many tokens the bins below i have.
fn find_firsts(thread: u32) {
    let mine = atomicLoad(&bins[row * ROW_WORDS + thread]);
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
    row = group.y;
    settings = settings_table[slot_in(batch.rows[row])];
    atomicStore(&counts[thread], 0u);
    find_firsts(thread);
    let best = best_penalised(params.parts, thread).value;
    let needed = select(settings.top_k, params.vocab, settings.top_k == 0u);
    let first = group.x * CHUNK + thread;
    var indices: array<u32, CHUNK / THREADS>;
    for (var i = 0u; i < CHUNK / THREADS; i++) {
        let id = first + i * THREADS;
        indices[i] = LEFT_OUT;
        if (id < params.vocab) {
            let bin = bin_of(values[row * params.vocab + id].x, best);
            if (firsts[bin] < needed) {
                indices[i] = atomicAdd(&counts[bin], 1u);
            }
        }
    }
    workgroupBarrier();
    let count = atomicLoad(&counts[thread]);
    if (count > 0u) {
        firsts[thread] += atomicAdd(&bins[row * ROW_WORDS + WORDS + thread], count);
    }
    workgroupBarrier();
    for (var i = 0u; i < CHUNK / THREADS; i++) {
        if (indices[i] != LEFT_OUT) {
            let id = first + i * THREADS;
            let value = values[row * params.vocab + id].x;
            items[row * params.vocab + firsts[bin_of(value, best)] + indices[i]] = vec2(ordinal(bitcast<u32>(value)), id);
        }
    }
}
