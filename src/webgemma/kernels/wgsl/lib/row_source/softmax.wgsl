// source: four weights of softmax(logits / temperature), relative to the likeliest id's: see expected_embedding.
// uses: denoising position_stats

struct Params {
    width: u32,
    first: u32, // position of the first row of logits
}

var<storage, read> logits: array<vec4<f32>>;
var<storage, read> stats: array<PositionStats>;

fn source(row: u32, i: u32) -> vec4<f32> {
    let top = stats[params.first + row].top;
    return exp((logits[row * (params.width / 4u) + i] - top) * denoising.inverse_temperature);
}
