// Image and audio decoding for Python in a browser and for the page, by the browser's decoders. WAV is decoded
// here: with the same result as natively, and also in workers, which have no audio decoder.
"use strict";

const STRIP_PIXELS = 2 ** 22; // read from a canvas at a time: browsers limit its size
const HEAD_NBYTES = 2 ** 18; // of an image file, searched for width and height
const RATE = 16000; // samples per second that the audio encoders take
const ZEROS = 64; // zero crossings of the resampler's sinc on each side, as in audio_files.py
const CUTOFF = 0.955; // of the lower Nyquist frequency, where the filter has half its gain
const PRODUCTS_PER_YIELD = 2 ** 25; // multiplications before the resampler yields: a few hundredths of a second
const BLACKMAN_HARRIS = [0.35875, 0.48829, 0.14128, 0.01168];

/** Return an error; its name says what is wrong, and media/browser.py turns that into a message. */
const failure = (name, message = "") => Object.assign(new Error(message), { name });

/** Return the bytes of a file in memory (of JavaScript or Python), or undefined; call it before the first await. */
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

// Images

/** Return [width, height] that the header of a PNG, GIF or JPEG declares, or null: read before pixels are allocated. */
function declaredSize(head) {
  const startsWith = (...bytes) => bytes.every((byte, at) => at < head.byteLength && head.getUint8(at) === byte);
  if (startsWith(0x89, 0x50, 0x4e, 0x47) && head.byteLength >= 24) return [head.getUint32(16), head.getUint32(20)];
  if (startsWith(0x47, 0x49, 0x46) && head.byteLength >= 10) return [head.getUint16(6, true), head.getUint16(8, true)];
  if (!startsWith(0xff, 0xd8)) return null;
  for (let at = 2; at + 9 <= head.byteLength; at += 2 + head.getUint16(at + 2)) {
    const marker = head.getUint16(at);
    const isFrame = marker >= 0xffc0 && marker <= 0xffcf && ![0xffc4, 0xffc8, 0xffcc].includes(marker);
    if (isFrame) return [head.getUint16(at + 7), head.getUint16(at + 5)];
  }
  return null;
}

/** Decode an image to {width, height, rgb}, upright and on white; without rgb if it exceeds maxPixels. */
async function decodeImage(source, maxPixels) {
  const bytes = bytesIn(source);
  const image = bytes ? new Blob([bytes]) : source;
  if (image instanceof Blob) {
    const declared = declaredSize(new DataView(await image.slice(0, HEAD_NBYTES).arrayBuffer()));
    if (declared && declared[0] * declared[1] > maxPixels) return { width: declared[0], height: declared[1] };
  }
  const bitmap = await createImageBitmap(image, { colorSpaceConversion: "none" });
  try {
    const { width, height } = bitmap;
    return width * height > maxPixels ? { width, height } : { width, height, rgb: rgbPixels(bitmap) };
  } finally {
    bitmap.close();
  }
}

/** Return the pixels of a bitmap as RGB bytes [height, width, 3]. */
function rgbPixels(bitmap) {
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

// Audio

/** Decode audio to {samples, loudest}: 16 kHz, channels averaged; loudest is NaN or infinite if a sample is. */
async function decodeAudio(source, maxSeconds = Infinity) {
  const samples = isSamples(source) ? Float32Array.from(source) : await decodeFile(source, maxSeconds);
  let loudest = 0;
  for (const value of samples) loudest = Math.max(loudest, Math.abs(value));
  return { samples, loudest };
}

const isSamples = (source) => source instanceof Float32Array || source instanceof Float64Array;

async function decodeFile(source, maxSeconds) {
  const bytes = bytesIn(source) ?? new Uint8Array(await source.arrayBuffer());
  if (!bytes.length) throw failure("empty");
  const wav = readWav(new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength)) ?? await decodeWithBrowser(bytes);
  if (wav.count / wav.rate > maxSeconds) throw failure("long");
  return resample(average(wav), wav.rate);
}

/** Decode a file with the browser's decoder, which resamples to the rate of its context. */
async function decodeWithBrowser(bytes) {
  if (!globalThis.OfflineAudioContext) throw failure("no decoder");
  const buffer = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(bytes.slice().buffer);
  const channels = Array.from({ length: buffer.numberOfChannels }, (_, at) => buffer.getChannelData(at));
  return { rate: RATE, count: buffer.length, channels: channels.length, valueAt: (at, channel) => channels[channel][at] };
}

/** Return the mean of the channels of each sample. */
function average({ count, channels, valueAt }) {
  const samples = new Float32Array(count);
  for (let at = 0; at < count; at += 1) {
    let sum = 0;
    for (let channel = 0; channel < channels; channel += 1) sum += valueAt(at, channel);
    samples[at] = sum / channels;
  }
  return samples;
}

// Readers of a WAV sample by format (1: integers, 3: floats) and bits; full scale is 1.
const WAV_VALUES = {
  "1 8": (view, at) => (view.getUint8(at) - 128) / 128,
  "1 16": (view, at) => view.getInt16(at, true) / 2 ** 15,
  "1 24": (view, at) => (view.getUint16(at, true) + 65536 * view.getInt8(at + 2)) / 2 ** 23,
  "1 32": (view, at) => view.getInt32(at, true) / 2 ** 31,
  "3 32": (view, at) => view.getFloat32(at, true),
  "3 64": (view, at) => view.getFloat64(at, true),
};

/** Parse a WAV file to {rate, count, channels, valueAt(at, channel)}; null if it is not WAV or of a rare format. */
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
  throw failure("undecodable");
}

/** Parse the format chunk; null for formats that the browser's decoder is left to try. */
function readFormat(view, at, nbytes) {
  const isExtended = view.getUint16(at, true) === 0xfffe && nbytes >= 26 && at + 26 <= view.byteLength;
  const kind = view.getUint16(isExtended ? at + 24 : at, true);
  const [channels, rate, bits] = [view.getUint16(at + 2, true), view.getUint32(at + 4, true), view.getUint16(at + 14, true)];
  const value = WAV_VALUES[`${kind} ${bits}`];
  if (!value || !channels) return null;
  if (rate < 1000 || rate > 768000) throw Object.assign(failure("rate"), { rate });
  return { value, channels, rate, nbytes: bits / 8 };
}

/** Return the samples of the data chunk; a truncated file has those before its end. */
function wavSamples(view, { value, channels, rate, nbytes }, body, declaredNbytes) {
  const count = Math.floor(Math.min(declaredNbytes, view.byteLength - body) / (nbytes * channels));
  return { rate, count, channels, valueAt: (at, channel) => value(view, body + nbytes * (at * channels + channel)) };
}

const yieldToBrowser = () => new Promise((resolve) => { setTimeout(resolve); });
const gcd = (a, b) => (b ? gcd(b, a % b) : a);

/** Resample to 16 kHz, as defined in audio_files.py; yields now and then, so that the page stays responsive. */
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
    const fraction = ((phase * down) % up) / up;
    for (let k = 0; k < weights.length; k += 1) weights[k] = scale * kernel(scale * (fraction - (k - reach)));
    let first = Math.floor((phase * down) / up);
    for (let m = phase; m < out.length; m += up, first += down) {
      let sum = 0;
      for (let k = 0; k < weights.length; k += 1) sum += weights[k] * padded[first + k];
      out[m] = sum;
      done += weights.length;
      if (done < PRODUCTS_PER_YIELD) continue;
      done = 0;
      await yieldToBrowser();
    }
  }
  return out;
}

/** Return sin(π c t) / (π t) times a Blackman-Harris window that ends at ±ZEROS. */
function kernel(t) {
  if (Math.abs(t) >= ZEROS) return 0;
  const angle = (Math.PI * t) / ZEROS;
  const window = BLACKMAN_HARRIS.reduce((sum, term, order) => sum + term * Math.cos(order * angle), 0);
  return (t === 0 ? CUTOFF : Math.sin(Math.PI * CUTOFF * t) / (Math.PI * t)) * window;
}

// Pyodide converts plain errors only, so others are rethrown as such.
const withPlainErrors = (decode) => async (...args) => {
  try {
    return await decode(...args);
  } catch ({ name, message, rate }) {
    throw Object.assign(new Error(message), { name, rate });
  }
};

globalThis.webgemmaMedia = { decodeImage: withPlainErrors(decodeImage), decodeAudio: withPlainErrors(decodeAudio) };
