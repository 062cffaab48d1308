// What `penalise` leaves of each CHUNK of the vocabulary, and the whole of a row put together from these partials.
// uses: workgroup_best workgroup_sum sampling_settings

override THREADS: u32;

struct Partial {
    best: Best, // of the penalised logits
    best_own: f32, // the model's own logit of that token
    own: Best, // of the model's own logits
    sum: f32, // of exp(own logit - own.value), at least 1; below 0 where a logit is not finite
}

const ALARM: f32 = -1.0e30; // outweighs every sum

fn best_penalised(parts: u32, thread: u32) -> Best {
    var mine = Best(LOWEST, NO_ID);
    for (var i = thread; i < parts; i += THREADS) {
        mine = better(mine, partials[row * parts + i].best);
    }
    return workgroup_best(mine, thread);
}

// The logarithm of the sum of exp over the model's own logits; LOWEST if one of them is not finite, which
// makes log-probabilities impossibly large: the host sees it in the result that it reads anyway.
fn log_total(parts: u32, thread: u32) -> f32 {
    var mine = Best(LOWEST, NO_ID);
    for (var i = thread; i < parts; i += THREADS) {
        mine = better(mine, partials[row * parts + i].own);
    }
    let highest = workgroup_best(mine, thread).value;
    var sum = 0.0;
    for (var i = thread; i < parts; i += THREADS) {
        let part = partials[row * parts + i].sum;
        sum += select(part * exp(partials[row * parts + i].own.value - highest), ALARM, part < 0.0);
    }
    let total = workgroup_sum(sum, thread);
    if (total < 0.0) {
        return LOWEST;
    }
    return highest + log(total);
}
