// What changes from step to step, with soft tokens among those of the batch.

struct State {
    first: u32, // position of the batch's first token
    count: u32, // tokens in the batch; rows beyond it are left alone
    ends: array<u32>, // of a soft token the first position it does not see; 0 for the others
}
