// The backward pass of y = w x r with r = 1 / sqrt(mean(x^2) + eps) for x = scale * input:
// dinput = scale r (g - x r^2 mean(g x)), g = w dy. One workgroup per row.
// uses: workgroup_sum

struct Params {
    width: u32,
    eps: f32,
    scale: f32,
    add: u32, // 1: to what dx holds
}

override THREADS: u32;

var<storage, read> input: array<vec4<f32>>;
var<storage, read> w: array<vec4<f32>>;
var<storage, read> dy: array<vec4<f32>>;
var<storage, read_write> dx: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let vec4s = params.width / 4u;
    let at = (group.y * groups.x + group.x) * vec4s;
    var squares = 0.0;
    var dots = 0.0;
    for (var i = thread; i < vec4s; i += THREADS) {
        let x = params.scale * input[at + i];
        squares += dot(x, x);
        dots += dot(x, w[i] * dy[at + i]);
    }
    let mean = workgroup_sum(squares, thread) / f32(params.width);
    let r = inverseSqrt(mean + params.eps);
    let slope = r * r * workgroup_sum(dots, thread) / f32(params.width);
    for (var i = thread; i < vec4s; i += THREADS) {
        let x = params.scale * input[at + i];
        let gradient = params.scale * r * (w[i] * dy[at + i] - slope * x);
        dx[at + i] = gradient + select(vec4(0.0), dx[at + i], params.add == 1u);
    }
}
