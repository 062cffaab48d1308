// What changes from step to step: where the batch begins, how many tokens it has.

struct State {
    first: u32, // position of the batch's first token
    count: u32, // tokens in the batch; rows beyond it are left alone
}
