// TEAM: neighbouring threads that are in one subgroup, in order.

const TEAM: u32 = 32u;
