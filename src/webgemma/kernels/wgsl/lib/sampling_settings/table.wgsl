// How the next token of each conversation is chosen: the settings as the kernels read them, written once for a
// generation. A workgroup samples from one row of logits, with the settings of its conversation.
// uses: conversations

struct Settings {
    temperature: f32,
    typical_p: f32,
    top_p: f32,
    min_p_log: f32, // log(min_p): how far below the best logit a candidate may be
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    top_k: u32, // 0: all
    recent: u32, // tokens that the penalties cover; 0 where there is no penalty
    bias_count: u32,
    seed: vec2<u32>, // low and high half
    @size(16) top_logprobs: u32, // how many of the likeliest to report; arrays of uniforms need steps of 16 bytes
}

var<uniform> settings_table: array<Settings, MAX_SLOTS>; // by their slots

var<private> settings: Settings; // of this row
var<private> row: u32;
