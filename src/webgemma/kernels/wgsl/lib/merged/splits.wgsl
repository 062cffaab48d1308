// merged_splits: four values of a head, put together from every `step`-th of the splits of attention_decode: each is
// scaled to the maximum that is common to all. Divided by the total over all splits, their sum is attention's result.

override HEAD_DIM: u32;
override SPLITS: u32;

var<storage, read> parts: array<vec4<f32>>; // [head, split, HEAD_VEC4S]
var<storage, read> sums: array<vec2<f32>>; // [head, split]: maximum, sum

const HEAD_VEC4S: u32 = HEAD_DIM / 4u;

struct Merged {
    values: vec4<f32>,
    total: f32,
}

fn merged_splits(head: u32, column: u32, first: u32, step: u32) -> Merged {
    let at = head * SPLITS;
    var best = -3.0e38;
    for (var i = 0u; i < SPLITS; i++) {
        best = max(best, sums[at + i].x);
    }
    var merged = Merged(); // set each time: inside a loop, a bare variable may keep what it had
    for (var i = first; i < SPLITS; i += step) {
        let weight = exp(sums[at + i].x - best);
        merged.total += sums[at + i].y * weight;
        merged.values += parts[(at + i) * HEAD_VEC4S + column] * weight;
    }
    return merged;
}
