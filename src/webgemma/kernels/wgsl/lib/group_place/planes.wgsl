// group_place: where vec4 k of a group is among the vec4s of quantised rows, see integer_dot. Eight groups are stored
// vec4 by vec4, so that threads that read neighbouring groups read neighbouring vec4s; of every second eight, pairs are
// exchanged, so that threads two groups apart use other banks.
// uses: integer_width

const QUARTERS: u32 = 2u * BYTES + 1u; // vec4s of a group

fn group_place(group: u32, k: u32) -> u32 {
    return group / 8u * (8u * QUARTERS) + 8u * k + ((group % 8u) ^ (group / 8u % 2u));
}
