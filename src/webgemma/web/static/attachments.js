// Attachments of messages, images and audio: {id, kind: "image" | "audio", name, blob, seconds?}. The blob is the
// file as it was attached, or null if the browser does not have it any more.

import "./package/media/browser.js"; // decodes audio as Python does, but Python's worker has no audio decoder
import { button, element, randomId } from "./dom.js";

const MAX_SECONDS = 3 * 60 * 60; // as in media/audio_files.py
const EXTENSIONS = {
  image: /\.(png|jpe?g|gif|webp|avif|bmp|hei[cf]|tiff?|svg)$/i,
  audio: /\.(wav|mp3|ogg|oga|opus|flac|m4a|aac|weba)$/i,
};

/** Return "image", "audio", or undefined for a file that cannot be attached. */
export function kindOf({ type, name }) {
  return Object.keys(EXTENSIONS).find((kind) => type.startsWith(`${kind}/`) || (!type && EXTENSIONS[kind].test(name)));
}

/** Return a time as players show it: 0:07, 12:34. */
export const clock = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;

/** Return an attachment of a file that this browser can decode; else throw an Error with a message for the user. */
export async function attach(file) {
  const kind = kindOf(file);
  const name = file.name || (kind === "image" ? "Image" : "Audio");
  if (!kind) throw new Error(`${name} is not an image, audio or a model (.gguf).`);
  const attachment = { id: randomId(), kind, name, blob: file };
  if (kind === "audio") return { ...attachment, seconds: (await samplesOf(attachment)).length / 16000 };
  try {
    (await createImageBitmap(file)).close();
  } catch {
    throw new Error(`${name} is damaged or not an image that this browser can read: use JPEG, PNG, GIF, WebP, AVIF or BMP.`);
  }
  return attachment;
}

const decoded = new WeakMap(); // promises of samples, by blob

/** Return the samples of audio at 16 kHz; throw an Error with a message for the user. */
export async function samplesOf({ name, blob }) {
  if (!decoded.has(blob)) decoded.set(blob, globalThis.webgemmaMedia.decodeAudio(blob, MAX_SECONDS));
  try {
    const { samples } = await decoded.get(blob);
    if (samples.length) return samples;
  } catch (error) {
    if (error.name === "long") throw new Error(`${name} is longer than 3 hours: split it into shorter files.`);
  }
  throw new Error(`${name} is damaged, empty or not audio that this browser can play.`);
}

/** Return the content of a message: attachments, of which `partOf` makes what an engine reads, before the text. */
export async function contentOf({ content, attachments = [] }, partOf) {
  const lost = attachments.find(({ blob }) => !blob);
  if (lost) throw new Error(`${lost.name} is no longer stored in this browser: edit the message without it.`);
  if (!attachments.length) return content;
  const parts = await Promise.all(attachments.map(partOf));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

const urls = new WeakMap(); // never revoked: the blob may be shown again

function urlOf(blob) {
  if (!urls.has(blob)) urls.set(blob, URL.createObjectURL(blob));
  return urls.get(blob);
}

/** Return the element of an attachment: the image, or the name of the audio, with a player if isPlayable. */
export function attachmentElement({ kind, name, blob, seconds }, { isPlayable = false } = {}) {
  if (!blob) return element("span", "lost", `${name} is no longer stored`);
  if (kind === "image") {
    const image = element("img");
    Object.assign(image, { src: urlOf(blob), alt: name, title: name });
    return image;
  }
  const label = element("span", "audio-label", element("span", "name", name), element("span", "time", clock(seconds)));
  if (!isPlayable) return label;
  const player = element("audio");
  Object.assign(player, { src: urlOf(blob), controls: true, preload: "metadata", ariaLabel: name });
  return element("div", "player", label, player);
}

/** Return list items of attachments, each with a button that calls `remove(attachment)`. */
export function attachmentList(attachments, remove) {
  return attachments.map((attachment) => {
    const removeButton = button("✕", "icon", () => remove(attachment));
    removeButton.ariaLabel = `Remove ${attachment.name}`;
    return element("li", attachment.kind, attachmentElement(attachment), removeButton);
  });
}

// As JSON, for exported conversations.

export const asDataUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/** Return an attachment with its file as a data: URL. */
export async function exportFileData({ id, kind, name, blob, seconds }) {
  return { id, kind, name, seconds, data: blob ? await asDataUrl(blob) : null };
}

/** Whether the facts of an exported attachment are valid. */
export function isAttachment(entry) {
  const { id, kind, name, seconds } = entry ?? {};
  const hasTexts = [id, name].every((text) => typeof text === "string" && text);
  return hasTexts && Object.hasOwn(EXTENSIONS, kind) && (kind === "audio") === Number.isFinite(seconds);
}

/** Return the file of an exported attachment, or undefined if it is not valid. */
export function fileBlob(url, kind) {
  const [, type, text] = String(url).match(/^data:([\w.+-]+\/[\w.+-]+)[^,]*;base64,([\w+/=]*)$/) ?? [];
  if (text === undefined || !(type.startsWith(`${kind}/`) || type === "application/octet-stream")) return undefined;
  try {
    return new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))], { type });
  } catch {
    return undefined; // not base64
  }
}
