// WAV files, of recordings and of audio that is sent to a server.

/** Return a file of 16-bit samples, from chunks of floats with `count` samples together. */
export function wavOf(chunks, count, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * count));
  const write = (at, text) => [...text].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  write(0, "RIFF");
  view.setUint32(4, 36 + 2 * count, true);
  write(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // format: integers
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  write(36, "data");
  view.setUint32(40, 2 * count, true);
  let at = 44;
  for (const chunk of chunks) {
    for (const value of chunk) {
      view.setInt16(at, Math.max(-32768, Math.min(32767, Math.round(value * 32768))), true);
      at += 2;
    }
  }
  return new Blob([view], { type: "audio/wav" });
}
