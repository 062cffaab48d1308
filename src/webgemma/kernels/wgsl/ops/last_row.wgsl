// row = h[count - 1]: the last token's row of a batch, for the head.

struct Params {
    width: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: State;
@group(0) @binding(2) var<storage, read> h: array<f32>;
@group(0) @binding(3) var<storage, read_write> row: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < params.width) {
        row[id.x] = h[(state.count - 1u) * params.width + id.x];
    }
}
