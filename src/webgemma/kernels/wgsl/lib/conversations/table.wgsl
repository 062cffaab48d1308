// The table of conversations that decode together: see batch/rows.

const MAX_SLOTS: u32 = 64u;

struct Conversation {
    position: u32, // of the token
    token: u32,
}

struct Rows {
    first: u32,
    count: u32, // conversations that take part
    reserved: vec2<u32>,
    slots: array<u32, MAX_SLOTS>, // of the rows
    conversations: array<Conversation, MAX_SLOTS>, // by their slots
}
