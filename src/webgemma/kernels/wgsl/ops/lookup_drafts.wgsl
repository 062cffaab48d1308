// Drafts found in a conversation itself: where its last tokens have stood before, what followed them there may follow
// again. Of all places before the last token, the one at which most of the last tokens agree, LONGEST at most and
// SHORTEST at least, and of those the latest; then the DRAFTS tokens after it, over again where the text ends. Without
// such a place, the last token. One workgroup for each conversation, which has LINE rows.
// uses: batch=advancing

struct Params {
    ring: u32, // length of `tokens` of a conversation
}

override THREADS: u32;
override LINE: u32;
override DRAFTS: u32;
override LONGEST: u32;
override SHORTEST: u32;

const PLACE_BITS: u32 = 24u; // of a place among the bits of a candidate; above them, how many tokens agree

var<storage, read> tokens: array<u32>; // [slot, ring]

var<workgroup> best: atomic<u32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.x * LINE;
    let slot = slot_in(batch.rows[row]);
    let last = batch.conversations[slot].position;
    let first = slot * params.ring;
    let places = select(0u, last, row < batch.count);
    if (thread == 0u) {
        atomicStore(&best, 0u);
    }
    workgroupBarrier();
    for (var place = thread; place < places; place += THREADS) {
        var agreed = 0u;
        while (agreed < LONGEST && agreed <= place
            && tokens[first + (place - agreed) % params.ring] == tokens[first + (last - agreed) % params.ring]) {
            agreed += 1u;
        }
        if (agreed >= SHORTEST) {
            atomicMax(&best, (agreed << PLACE_BITS) | place);
        }
    }
    workgroupBarrier();
    if (thread < DRAFTS && row < batch.count) {
        let found = atomicLoad(&best);
        let place = select(last - 1u, extractBits(found, 0u, PLACE_BITS), found > 0u);
        let at = place + 1u + thread % (last - place);
        batch.drafts[slot * MAX_DRAFTS + thread] = tokens[first + at % params.ring];
    }
}
