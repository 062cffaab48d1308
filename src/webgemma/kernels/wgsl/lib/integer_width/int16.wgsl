// Activations as 16-bit integers: an integer is 256 high + low, two int8; 127 * 256 is the largest whose
// halves both are.

const BYTES: u32 = 2u;
const LARGEST: f32 = 32512.0;
