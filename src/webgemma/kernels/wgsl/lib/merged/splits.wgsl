// merged_vec4: four values of a head, the splits of attention_decode put together: each scaled to the common maximum,
// over the common sum.

override HEAD_DIM: u32;
override SPLITS: u32;

var<storage, read> parts: array<vec4<f32>>; // [head, split, HEAD_VEC4S]
var<storage, read> sums: array<vec2<f32>>; // [head, split]: maximum, sum

const HEAD_VEC4S: u32 = HEAD_DIM / 4u;

fn merged_vec4(head: u32, column: u32) -> vec4<f32> {
    let first = head * SPLITS;
    var best = -3.0e38;
    for (var i = 0u; i < SPLITS; i++) {
        best = max(best, sums[first + i].x);
    }
    var total = 0.0;
    var sum = vec4(0.0);
    for (var i = 0u; i < SPLITS; i++) {
        let weight = exp(sums[first + i].x - best);
        total += sums[first + i].y * weight;
        sum += parts[(first + i) * HEAD_VEC4S + column] * weight;
    }
    return sum / total;
}
