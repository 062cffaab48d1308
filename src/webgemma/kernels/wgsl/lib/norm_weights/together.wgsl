// The vectors around a residual, all in one buffer: a kernel binds eight of them at most. Parameters count vec4s.

struct Params {
    post: u32,
    scale: u32,
    next: u32,
    norms: u32,
}

var<storage, read> vectors: array<vec4<f32>>;

fn post_weight(column: u32) -> vec4<f32> {
    return vectors[params.post + column];
}

fn output_scale() -> f32 {
    return vectors[params.scale].x;
}

fn next_weight(column: u32) -> vec4<f32> {
    return vectors[params.next + column];
}

fn branch_weight(column: u32) -> vec4<f32> {
    return vectors[params.norms + column];
}
