// row = h[count - 1]: the last token's row of a batch, for the head. A thread takes one value.
// uses: batch=tokens

struct Params {
    width: u32,
}

override THREADS: u32 = 64u;

var<storage, read> h: array<f32>;
var<storage, read_write> row: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < params.width) {
        row[id.x] = h[(batch.count - 1u) * params.width + id.x];
    }
}
