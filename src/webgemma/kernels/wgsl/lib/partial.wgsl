// What `penalise` leaves of each CHUNK of the vocabulary, and the whole put together from the parts.

struct Partial {
    best: Best, // of the changed logits
    own: Best, // of the model's own
    sum: f32, // of exp(own logit - own.value)
}

fn best_changed(parts: u32, thread: u32) -> Best {
    var mine = Best(LOWEST, NOBODY);
    for (var i = thread; i < parts; i += THREADS) {
        mine = better(mine, partials[i].best);
    }
    return workgroup_best(mine, thread);
}

// The logarithm of the sum of exp over the model's own logits.
fn log_total(parts: u32, thread: u32) -> f32 {
    var mine = Best(LOWEST, NOBODY);
    for (var i = thread; i < parts; i += THREADS) {
        mine = better(mine, partials[i].own);
    }
    let highest = workgroup_best(mine, thread).value;
    var sum = 0.0;
    for (var i = thread; i < parts; i += THREADS) {
        sum += partials[i].sum * exp(partials[i].own.value - highest);
    }
    return highest + log(workgroup_sum(sum, thread));
}
