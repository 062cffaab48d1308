// x[t] = (x[t] + rms(y[t]) * post) * scale, then the norms of x[t] that follow. One workgroup per token, whose
// threads keep their shares of the row. The slot `added` says what y is, `next_norms` what follows.
// uses: residual_sum norm_weights=apart next_norms

override THREADS: u32;

var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = group.x * VEC4S;
    // All reads are requested before anything is waited for.
    var old: Row;
    for (var each = 0u; each < SHARE; each++) {
        old[each] = select(vec4(0.0), x[at + column_of(each, thread)], is_live(each, thread));
    }
    let following = following_weights(thread);
    let sum = residual_sum(at, old, thread);
    for (var each = 0u; each < SHARE; each++) {
        if (is_live(each, thread)) {
            x[at + column_of(each, thread)] = sum[each];
        }
    }
    store_next(at, sum, following, thread);
}
