// Moves one part of every block of a chunk to its plane: thread i writes word i of the plane's chunk, byte by byte,
// since blocks of 18, 34 or 210 bytes begin anywhere.

struct Params {
    block_nbytes: u32,
    part_offset: u32,
    part_nbytes: u32,
    words: u32,
    first_word: u32, // of the chunk within the whole tensor, plane's start included
}

override THREADS: u32;

var<storage, read> chunk: array<u32>;
var<storage, read_write> planes: array<u32>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (group.y * groups.x + group.x) * THREADS + thread;
    if (i >= params.words) {
        return;
    }
    var word = 0u;
    for (var b = 0u; b < 4u; b++) {
        let byte = 4u * i + b;
        let from_byte = byte / params.part_nbytes * params.block_nbytes
            + params.part_offset + byte % params.part_nbytes;
        word |= ((chunk[from_byte / 4u] >> (8u * (from_byte % 4u))) & 255u) << (8u * b);
    }
    planes[params.first_word + i] = word;
}
