// multiply_rows: for each row n, the sum over k of W[n, k] x[t, k], handed to finish(t, before + n, sum), for TOKENS
// tokens from t on. EACH rows are shared by LANES threads next to each other, in each of TEAMS teams, so that what is
// read of x serves all of them. Of `count` workgroups, each computes ROWS rows at a time. However many teams there
// are, the LANES * TEAMS sums of a row are added up as lane_sum would add them: those farthest apart first.
// uses: live lane_sum row_products epilogue format

struct Params {
    rows: u32, // in this part of W
}

override THREADS: u32;
override LANES: u32;
override TEAMS: u32 = 1u;
override EACH: u32;
override TOKENS: u32 = 1u;

const TEAM_THREADS: u32 = THREADS / TEAMS;
const ROWS: u32 = TEAM_THREADS / LANES * EACH;
const SUMS: u32 = EACH * TOKENS; // of a thread
const SHARED_SUMS: u32 = select(1u, TEAMS / 2u * TEAM_THREADS * SUMS, TEAMS > 1u);

var<workgroup> team_sums: array<f32, SHARED_SUMS>;

fn row_of(first: u32, each: u32) -> u32 {
    return min(first + each, params.rows - 1u);
}

// To the sums of the first team, those of the others.
fn add_teams(sums: ptr<function, array<f32, SUMS>>, thread: u32) {
    for (var step = TEAMS / 2u; step > 0u; step = step / 2u) {
        let team = thread / TEAM_THREADS;
        workgroupBarrier(); // earlier sums have been read
        if (team >= step && team < 2u * step) {
            for (var i = 0u; i < SUMS; i++) {
                team_sums[i * step * TEAM_THREADS + thread - step * TEAM_THREADS] = (*sums)[i];
            }
        }
        workgroupBarrier();
        if (team < step) {
            for (var i = 0u; i < SUMS; i++) {
                (*sums)[i] += team_sums[i * step * TEAM_THREADS + thread];
            }
        }
    }
}

fn multiply_rows(t: u32, before: u32, group: u32, count: u32, thread: u32) {
    let lane = thread / TEAM_THREADS * LANES + thread % LANES;
    for (var begin = group * ROWS; begin < params.rows; begin += count * ROWS) {
        let first = begin + thread % TEAM_THREADS / LANES * EACH;
        var sums = array<f32, SUMS>();
        if (first < params.rows) {
            add_row(t, first, lane, &sums);
        }
        add_teams(&sums, thread);
        for (var i = 0u; i < SUMS; i++) {
            let sum = lane_sum(sums[i], thread);
            let each = i / TOKENS;
            let token = t + i % TOKENS;
            if (lane == 0u && first + each < params.rows && is_token(token)) {
                finish(token, before + first + each, sum);
            }
        }
    }
}
