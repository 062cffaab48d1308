// id_of: the id of row t, from a buffer.
// uses: place=chunk

var<storage, read> ids: array<u32>;

fn id_of(t: u32) -> u32 {
    return ids[t];
}
