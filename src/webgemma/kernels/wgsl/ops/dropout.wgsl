// y[i] = x[i] / (1 - p) with probability 1 - p, else 0; which, is a hash of the step's seed, the adapter and i,
// so that the backward pass drops the same ones. Added to what y holds if add is 1. A thread takes one i.
// uses: training_step

struct Params {
    count: u32,
    adapter: u32,
    dropped: f32, // p
    add: u32,
}

override THREADS: u32 = 64u;

var<storage, read> x: array<f32>;
var<storage, read_write> y: array<f32>;

fn mixed(value: u32) -> u32 {
    var bits = value;
    bits = (bits ^ (bits >> 16u)) * 0x7feb352du;
    bits = (bits ^ (bits >> 15u)) * 0x846ca68bu;
    return bits ^ (bits >> 16u);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (group.y * groups.x + group.x) * THREADS + thread;
    if (i >= params.count) {
        return;
    }
    let bits = mixed(i ^ mixed(params.adapter ^ mixed(training_step.seed)));
    let chance = f32(bits >> 8u) / 16777216.0;
    let kept = select(0.0, x[i] / (1.0 - params.dropped), chance >= params.dropped);
    y[i] = kept + select(0.0, y[i], params.add == 1u);
}
