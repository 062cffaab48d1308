// The table of conversations that decode together: see batch/rows. A row is the token that its conversation reads next,
// or one of the drafts after it, so many ahead.

const MAX_SLOTS: u32 = 64u; // also of rows
const MAX_DRAFTS: u32 = 8u; // of a conversation

struct Conversation {
    position: u32, // of the token
    token: u32,
}

struct Rows {
    first: u32,
    count: u32, // rows that take part
    reserved: vec2<u32>,
    rows: array<u32, MAX_SLOTS>, // slot, how far ahead (from bit 8 on), whether masked (bit 16), whether ended (bit 17)
    conversations: array<Conversation, MAX_SLOTS>, // by their slots
    drafts: array<u32, MAX_SLOTS * MAX_DRAFTS>, // by their slots, in order
}

fn slot_in(entry: u32) -> u32 {
    return entry & 255u;
}

fn ahead_in(entry: u32) -> u32 {
    return extractBits(entry, 8u, 8u);
}

// Whether a mask says which tokens may follow.
fn is_masked(entry: u32) -> bool {
    return extractBits(entry, 16u, 1u) == 1u;
}

// Whether its conversation has ended: nothing follows.
fn has_ended(entry: u32) -> bool {
    return extractBits(entry, 17u, 1u) == 1u;
}
