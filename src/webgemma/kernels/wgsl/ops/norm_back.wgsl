// The way back through y = w x r with r = 1 / sqrt(mean(x^2) + eps) for x = scale * given:
// dgiven = scale r (g - x r^2 mean(g x)), g = w dy. One workgroup for each row.

struct Params {
    width: u32,
    eps: f32,
    scale: f32,
    add: u32, // 1: to what dx holds
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> given: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> w: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> dy: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> dx: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let fours = params.width / 4u;
    let at = (group.y * groups.x + group.x) * fours;
    var squares = 0.0;
    var dots = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        let x = params.scale * given[at + i];
        squares += dot(x, x);
        dots += dot(x, w[i] * dy[at + i]);
    }
    let mean = workgroup_sum(squares, thread) / f32(params.width);
    let r = inverseSqrt(mean + params.eps);
    let slope = r * r * workgroup_sum(dots, thread) / f32(params.width);
    for (var i = thread; i < fours; i += THREADS) {
        let x = params.scale * given[at + i];
        let step = params.scale * r * (w[i] * dy[at + i] - slope * x);
        dx[at + i] = step + select(vec4(0.0), dx[at + i], params.add == 1u);
    }
}
