// lora_scale: the scale with which the conversation of row t applies an adapter, or 0: see LoraScales. Which slot that
// is says the slot `place` of the op.

struct Params {
    lora_columns: u32, // scales of a conversation
}

var<storage, read> lora_scales: array<f32>;

fn lora_scale(t: u32, column: u32) -> f32 {
    return lora_scales[slot_of(t) * params.lora_columns + column];
}
