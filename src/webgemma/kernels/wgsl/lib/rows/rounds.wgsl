// multiply_rows: for each row n, the sum over k of W[n, k] x[t, k], handed to finish(t, before + n, sum), for TOKENS
// tokens from t on. LANES threads share EACH rows, so that what is read of x serves all of them. Of `count` workgroups,
// each computes ROWS rows at a time.
// uses: live lane_sum row_products epilogue format

struct Params {
    rows: u32, // in this part of W
}

override THREADS: u32;
override LANES: u32;
override EACH: u32;
override TOKENS: u32 = 1u;

const ROWS: u32 = THREADS / LANES * EACH;

fn row_of(first: u32, each: u32) -> u32 {
    return min(first + each, params.rows - 1u);
}

fn multiply_rows(t: u32, before: u32, group: u32, count: u32, thread: u32) {
    for (var begin = group * ROWS; begin < params.rows; begin += count * ROWS) {
        let first = begin + thread / LANES * EACH;
        var sums = array<f32, EACH * TOKENS>();
        if (first < params.rows) {
            add_row(t, first, thread % LANES, &sums);
        }
        for (var i = 0u; i < EACH * TOKENS; i++) {
            let sum = lane_sum(sums[i], thread);
            let each = i / TOKENS;
            let token = t + i % TOKENS;
            if (thread % LANES == 0u && first + each < params.rows && is_token(token)) {
                finish(token, before + first + each, sum);
            }
        }
    }
}
