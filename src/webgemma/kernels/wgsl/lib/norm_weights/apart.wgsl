// The vectors around a residual, each a buffer: post, scale, next (of one or several norms), and those of branches.

var<storage, read> post: array<vec4<f32>>;
var<storage, read> scale: array<f32>;
var<storage, read> next: array<vec4<f32>>;
var<storage, read> norms: array<vec4<f32>>;

fn post_weight(column: u32) -> vec4<f32> {
    return post[column];
}

fn output_scale() -> f32 {
    return scale[0];
}

fn next_weight(column: u32) -> vec4<f32> {
    return next[column];
}

fn branch_weight(column: u32) -> vec4<f32> {
    return norms[column];
}
