// x = the heads of x turned back by their angles, in place: a rotation's derivative. One workgroup
// for each head of a token, which is at position t - spans[t].x of its text.

struct Params {
    heads: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> spans: array<vec2<u32>>; // of each token's text
@group(0) @binding(2) var<storage, read> turns: array<vec2<u32>>;
@group(0) @binding(3) var<storage, read_write> x: array<vec4<f32>>;

const FOURS: u32 = HEAD_DIM / 4u;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = (group.y * params.heads + group.x) * FOURS;
    let half = FOURS / 2u;
    let p = group.y - spans[group.y].x;
    for (var i = thread; i < half; i += THREADS) {
        let turned = rotated(x[at + i], -x[at + half + i], p, i);
        x[at + i] = turned[0];
        x[at + half + i] = -turned[1];
    }
}
