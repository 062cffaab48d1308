// A dispatch of attention_prefill covers all keys: it resumes nothing and leaves nothing.

fn range_begin(low: u32) -> u32 {
    return low;
}

fn range_end(low: u32, high: u32) -> u32 {
    return high;
}

fn resume(softmax: ptr<function, Softmax>, tile: u32, thread: u32) {}

fn suspend(best: vec4<f32>, tile: u32, thread: u32) {}
