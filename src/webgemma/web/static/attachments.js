// Pictures and sounds that belong to a message: {id, kind: "image" | "audio", name, blob, seconds?}. The
// blob is the file as it was given; it is null where the browser has lost it.

import "/package/media/browser.js"; // decodes sounds as Python does, which cannot do it in its worker
import { element } from "./dom.js";

const MOST_SECONDS = 3 * 60 * 60; // as Python has it
const ENDINGS = {
  image: /\.(png|jpe?g|gif|webp|avif|bmp|hei[cf]|tiff?|svg)$/i,
  audio: /\.(wav|mp3|ogg|oga|opus|flac|m4a|aac|weba)$/i,
};

/** "image", "audio", or undefined for what can be no attachment. */
export function kindOf({ type, name }) {
  return Object.keys(ENDINGS).find((kind) => type.startsWith(`${kind}/`) || (!type && ENDINGS[kind].test(name)));
}

/** A time as players show it: 0:07, 12:34. */
export const clock = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;

/** An attachment of a file that this browser can decode; else an Error has the sentence. */
export async function attach(file) {
  const kind = kindOf(file);
  const name = file.name || (kind === "image" ? "Picture" : "Sound");
  if (!kind) throw new Error(`${name} is neither a picture nor a sound, nor a model (.gguf).`);
  const attachment = { id: crypto.randomUUID(), kind, name, blob: file };
  if (kind === "audio") return { ...attachment, seconds: (await samplesOf(attachment)).length / 16000 };
  try {
    (await createImageBitmap(file)).close();
  } catch {
    throw new Error(`${name} is damaged or no picture that this browser reads: JPEG, PNG, GIF, WebP, AVIF and BMP are.`);
  }
  return attachment;
}

const decoded = new WeakMap(); // the samples of blobs, as promises

/** The samples of a sound at 16 kHz; an Error has the sentence. */
async function samplesOf({ name, blob }) {
  if (!decoded.has(blob)) decoded.set(blob, globalThis.webgemmaMedia.sound(blob, MOST_SECONDS));
  try {
    const { samples } = await decoded.get(blob);
    if (samples.length) return samples;
  } catch (error) {
    if (error.name === "long") throw new Error(`${name} is longer than 3 hours: cut it into pieces.`);
  }
  throw new Error(`${name} is damaged, empty or no sound that this browser plays.`);
}

/** A message as the worker wants it: what is seen and heard in front of the text. */
export async function asParts({ content, attachments = [] }) {
  if (!attachments.length) return content;
  const parts = await Promise.all(attachments.map(asPart));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

async function asPart(attachment) {
  const { kind, name, blob } = attachment;
  if (!blob) throw new Error(`${name} is no longer kept in this browser: edit the message without it.`);
  return kind === "image" ? { type: "image", image: blob } : { type: "audio", audio: await samplesOf(attachment) };
}

const urls = new WeakMap(); // as long as the page lasts: what is shown again needs them again

export function urlOf(blob) {
  if (!urls.has(blob)) urls.set(blob, URL.createObjectURL(blob));
  return urls.get(blob);
}

/** What is shown of an attachment: the picture itself, or a sound's name; in messages also its player. */
export function shown({ kind, name, blob, seconds }, { isPlayable = false } = {}) {
  if (!blob) return element("span", "lost", `${name} is no longer here`);
  if (kind === "image") {
    const image = element("img");
    Object.assign(image, { src: urlOf(blob), alt: name, title: name });
    return image;
  }
  const label = element("span", "sound", element("span", "name", name), element("span", "time", clock(seconds)));
  if (!isPlayable) return label;
  const player = element("audio");
  Object.assign(player, { src: urlOf(blob), controls: true, preload: "metadata", ariaLabel: name });
  return element("div", "player", label, player);
}

// As JSON, for the archive.

const asDataUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/** An attachment with its file as a data: URL. */
export async function exported({ id, kind, name, blob, seconds }) {
  return { id, kind, name, seconds, data: blob ? await asDataUrl(blob) : null };
}

/** And back; null for what `exported` did not write. */
export function imported(given) {
  const { id, kind, name, seconds, data } = given ?? {};
  const texts = [id, name].every((text) => typeof text === "string" && text);
  if (!texts || !(kind in ENDINGS) || (kind === "audio") !== Number.isFinite(seconds)) return null;
  const blob = data === null ? null : blobOf(data, kind);
  return blob === undefined ? null : { id, kind, name, blob, seconds };
}

function blobOf(url, kind) {
  const [, type, text] = String(url).match(/^data:([\w.+-]+\/[\w.+-]+)[^,]*;base64,([\w+/=]*)$/) ?? [];
  if (text === undefined || !(type.startsWith(`${kind}/`) || type === "application/octet-stream")) return undefined;
  try {
    return new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))], { type });
  } catch {
    return undefined; // no base64
  }
}
