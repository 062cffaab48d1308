// Activations as 8-bit integers.

const BYTES: u32 = 1u;
const LARGEST: f32 = 127.0;
