// int8: an integer is a byte.

const BYTES: u32 = 1u;
const LARGEST: f32 = 127.0;
