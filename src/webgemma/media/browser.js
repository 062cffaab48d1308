// Pictures and sounds as Python in a browser, and the page, decode them: by the browser's own decoders, but
// WAV by us, as exactly as natively and also in workers, which have no decoder of sound.
"use strict";

const STRIP_PIXELS = 2 ** 22; // read at a time: browsers limit the size of a canvas
const HEAD_NBYTES = 2 ** 18; // of a file that says how large its picture is
const RATE = 16000; // samples a second, as models hear them
const ZEROS = 64; // of the resampler's sinc on each side, as in sounds.py
const CUTOFF = 0.955; // where it halves, of the lower of the two Nyquist frequencies
const RESTING_PRODUCTS = 2 ** 25; // of the resampler between two rests: a few hundredths of a second
const BLACKMAN_HARRIS = [0.35875, 0.48829, 0.14128, 0.01168];

const problem = (name, message = "") => Object.assign(new Error(message), { name });

/** The bytes of a file in memory, also of Python's, or undefined; to be called before anything is awaited. */
function bytesIn(source) {
  if (source instanceof ArrayBuffer) return new Uint8Array(source);
  if (ArrayBuffer.isView(source)) return new Uint8Array(source.buffer, source.byteOffset, source.byteLength);
  const view = typeof source?.getBuffer === "function" ? source.getBuffer("u8") : undefined;
  try {
    return view?.data.slice();
  } finally {
    view?.release();
  }
}

// Pictures

/** [width, height] that a PNG, GIF or JPEG claims to have, before memory is found for it. */
function claimedSize(head) {
  const begins = (...bytes) => bytes.every((byte, at) => at < head.byteLength && head.getUint8(at) === byte);
  if (begins(0x89, 0x50, 0x4e, 0x47) && head.byteLength >= 24) return [head.getUint32(16), head.getUint32(20)];
  if (begins(0x47, 0x49, 0x46) && head.byteLength >= 10) return [head.getUint16(6, true), head.getUint16(8, true)];
  if (!begins(0xff, 0xd8)) return null;
  for (let at = 2; at + 9 <= head.byteLength; at += 2 + head.getUint16(at + 2)) {
    const marker = head.getUint16(at);
    const isFrame = marker >= 0xffc0 && marker <= 0xffcf && ![0xffc4, 0xffc8, 0xffcc].includes(marker);
    if (isFrame) return [head.getUint16(at + 7), head.getUint16(at + 5)];
  }
  return null;
}

/** {width, height, rgb} of a picture, upright and on white; no rgb where it has too many pixels. */
async function picture(source, mostPixels) {
  const bytes = bytesIn(source);
  const image = bytes ? new Blob([bytes]) : source;
  if (image instanceof Blob) {
    const claimed = claimedSize(new DataView(await image.slice(0, HEAD_NBYTES).arrayBuffer()));
    if (claimed && claimed[0] * claimed[1] > mostPixels) return { width: claimed[0], height: claimed[1] };
  }
  const bitmap = await createImageBitmap(image, { colorSpaceConversion: "none" });
  try {
    const { width, height } = bitmap;
    return width * height > mostPixels ? { width, height } : { width, height, rgb: pixels(bitmap) };
  } finally {
    bitmap.close();
  }
}

function pixels(bitmap) {
  const { width, height } = bitmap;
  const rows = Math.min(height, Math.max(1, Math.floor(STRIP_PIXELS / width)));
  const context = new OffscreenCanvas(width, rows).getContext("2d", { alpha: false, willReadFrequently: true });
  const rgb = new Uint8Array(3 * width * height);
  context.fillStyle = "white";
  for (let top = 0, to = 0; top < height; top += rows) {
    context.fillRect(0, 0, width, rows);
    context.drawImage(bitmap, 0, -top);
    const { data } = context.getImageData(0, 0, width, Math.min(rows, height - top));
    for (let from = 0; from < data.length; from += 4) {
      rgb[to++] = data[from];
      rgb[to++] = data[from + 1];
      rgb[to++] = data[from + 2];
    }
  }
  return rgb;
}

// Sounds

/** {samples, loudest} of a sound: 16 kHz, its channels averaged; loudest is NaN or infinite if a sample is. */
async function sound(source, mostSeconds = Infinity) {
  const samples = isSamples(source) ? Float32Array.from(source) : await decoded(source, mostSeconds);
  let loudest = 0;
  for (const value of samples) loudest = Math.max(loudest, Math.abs(value));
  return { samples, loudest };
}

const isSamples = (source) => source instanceof Float32Array || source instanceof Float64Array;

async function decoded(source, mostSeconds) {
  const bytes = bytesIn(source) ?? new Uint8Array(await source.arrayBuffer());
  if (!bytes.length) throw problem("empty");
  const wav = readWav(new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength)) ?? await played(bytes);
  if (wav.count / wav.rate > mostSeconds) throw problem("long");
  return resample(average(wav), wav.rate);
}

/** What the browser's decoder makes of a file; a context resamples what it decodes. */
async function played(bytes) {
  if (!globalThis.OfflineAudioContext) throw problem("no decoder");
  const buffer = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(bytes.slice().buffer);
  const channels = Array.from({ length: buffer.numberOfChannels }, (_, at) => buffer.getChannelData(at));
  return { rate: RATE, count: buffer.length, channels: channels.length, valueAt: (at, channel) => channels[channel][at] };
}

function average({ count, channels, valueAt }) {
  const samples = new Float32Array(count);
  for (let at = 0; at < count; at += 1) {
    let sum = 0;
    for (let channel = 0; channel < channels; channel += 1) sum += valueAt(at, channel);
    samples[at] = sum / channels;
  }
  return samples;
}

// How WAV holds a sample, by format (1 whole numbers, 3 floats) and bits; full scale is 1.
const WAV_VALUES = {
  "1 8": (view, at) => (view.getUint8(at) - 128) / 128,
  "1 16": (view, at) => view.getInt16(at, true) / 2 ** 15,
  "1 24": (view, at) => (view.getUint16(at, true) + 65536 * view.getInt8(at + 2)) / 2 ** 23,
  "1 32": (view, at) => view.getInt32(at, true) / 2 ** 31,
  "3 32": (view, at) => view.getFloat32(at, true),
  "3 64": (view, at) => view.getFloat64(at, true),
};

/** What a WAV holds: {rate, count, channels, valueAt(at, channel)}; null: it is none, or of a rare kind. */
function readWav(view) {
  const name = (at) => String.fromCharCode(...Array.from({ length: 4 }, (_, i) => view.getUint8(at + i)));
  if (view.byteLength < 12 || name(0) !== "RIFF" || name(8) !== "WAVE") return null;
  let format = null;
  for (let at = 12; at + 8 <= view.byteLength; ) {
    const [kind, nbytes, body] = [name(at), view.getUint32(at + 4, true), at + 8];
    if (kind === "fmt " && body + 16 <= view.byteLength) {
      format = readFormat(view, body, nbytes);
      if (!format) return null;
    }
    if (kind === "data" && format) return wavSamples(view, format, body, nbytes);
    at = body + nbytes + (nbytes % 2);
  }
  throw problem("undecodable");
}

function readFormat(view, at, nbytes) {
  const isExtended = view.getUint16(at, true) === 0xfffe && nbytes >= 26 && at + 26 <= view.byteLength;
  const kind = view.getUint16(isExtended ? at + 24 : at, true);
  const [channels, rate, bits] = [view.getUint16(at + 2, true), view.getUint32(at + 4, true), view.getUint16(at + 14, true)];
  const value = WAV_VALUES[`${kind} ${bits}`];
  if (!value || !channels) return null;
  if (rate < 1000 || rate > 768000) throw Object.assign(problem("rate"), { rate });
  return { value, channels, rate, nbytes: bits / 8 };
}

/** A file that was cut has the samples that came. */
function wavSamples(view, { value, channels, rate, nbytes }, body, said) {
  const count = Math.floor(Math.min(said, view.byteLength - body) / (nbytes * channels));
  return { rate, count, channels, valueAt: (at, channel) => value(view, body + nbytes * (at * channels + channel)) };
}

const rest = () => new Promise((resolve) => { setTimeout(resolve); });
const gcd = (a, b) => (b ? gcd(b, a % b) : a);

/** The same sound at 16 kHz, by the definition in sounds.py; the page stays alive meanwhile. */
async function resample(samples, rate) {
  if (rate === RATE) return samples;
  const common = gcd(rate, RATE);
  const [up, down] = [RATE / common, rate / common]; // output m is at m · down / up
  const scale = Math.min(1, up / down);
  const reach = Math.ceil(ZEROS / scale);
  const padded = new Float32Array(samples.length + 2 * reach);
  padded.set(samples, reach);
  const out = new Float32Array(Math.ceil((samples.length * up) / down));
  const weights = new Float32Array(2 * reach + 1);
  let done = 0;
  for (let phase = 0; phase < Math.min(up, out.length); phase += 1) {
    const part = ((phase * down) % up) / up;
    for (let k = 0; k < weights.length; k += 1) weights[k] = scale * kernel(scale * (part - (k - reach)));
    let first = Math.floor((phase * down) / up);
    for (let m = phase; m < out.length; m += up, first += down) {
      let sum = 0;
      for (let k = 0; k < weights.length; k += 1) sum += weights[k] * padded[first + k];
      out[m] = sum;
      done += weights.length;
      if (done < RESTING_PRODUCTS) continue;
      done = 0;
      await rest();
    }
  }
  return out;
}

/** sin(π c t) / (π t) under a Blackman-Harris window that ends at ±ZEROS. */
function kernel(t) {
  if (Math.abs(t) >= ZEROS) return 0;
  const angle = (Math.PI * t) / ZEROS;
  const window = BLACKMAN_HARRIS.reduce((sum, term, order) => sum + term * Math.cos(order * angle), 0);
  return (t === 0 ? CUTOFF : Math.sin(Math.PI * CUTOFF * t) / (Math.PI * t)) * window;
}

// Pyodide knows plain errors best.
const plainly = (decode) => async (...given) => {
  try {
    return await decode(...given);
  } catch ({ name, message, rate }) {
    throw Object.assign(new Error(message), { name, rate });
  }
};

globalThis.webgemmaMedia = { picture: plainly(picture), sound: plainly(sound) };
