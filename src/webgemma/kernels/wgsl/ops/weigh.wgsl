// Tallies of the tokens of each bin, a bin being a quarter of a nat below the best changed logit: one
// workgroup for each CHUNK of tokens adds its own up, then adds them to everybody's.

struct Params {
    vocab: u32,
    parts: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> settings: Settings;
@group(0) @binding(2) var<storage, read> partials: array<Partial>;
@group(0) @binding(3) var<storage, read> values: array<vec2<f32>>; // changed, own
@group(0) @binding(4) var<storage, read_write> bins: array<atomic<u32>>;

fn add_everywhere(at: u32) {
    let x = atomicLoad(&sums[at]);
    let low = atomicAdd(&bins[at], x);
    atomicAdd(&bins[at + BINS], atomicLoad(&sums[at + BINS]) + select(0u, 1u, low + x < low));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    clear_sums(thread);
    let best = best_changed(params.parts, thread).value;
    let end = min((group.x + 1u) * CHUNK, params.vocab);
    for (var id = group.x * CHUNK + thread; id < end; id += THREADS) {
        let value = values[id].x;
        add_to_sums(bin_of(value, best), value, best);
    }
    workgroupBarrier();
    let count = atomicLoad(&sums[thread]); // of bin `thread`
    if (count > 0u) {
        atomicAdd(&bins[thread], count);
        add_everywhere(thread + BINS);
        add_everywhere(thread + 3u * BINS);
    }
}
