// Attachments of messages: {id, kind: "image" | "audio" | "document", name, blob, seconds?, nbytes?, pages?}. The blob
// is the file as it was attached, of a document its text, or null if the browser does not have it any more. A document
// has the `nbytes` of its file and, if it is a PDF, its `pages`.

import "./package/media/browser.js"; // decodes audio as Python does, but Python's worker has no audio decoder
import { isOtherMedia, PAGE_END, readDocument, shownName, sizeOf, tokensOf } from "./document_text.js";
import { showDocument } from "./document_view.js";
import { button, element, randomId } from "./dom.js";
import { language, t } from "./language.js";

const MAX_SECONDS = 3 * 60 * 60; // as in media/audio_files.py
const EXTENSIONS = {
  image: /\.(png|jpe?g|gif|webp|avif|bmp|hei[cf]|tiff?|svg)$/i,
  audio: /\.(wav|mp3|ogg|oga|opus|flac|m4a|aac|weba)$/i,
};

const KINDS = [...Object.keys(EXTENSIONS), "document"];

/** Return the kind of a file, or undefined if it cannot be attached. What is neither an image nor audio may be text. */
export function kindOf({ type, name }) {
  const media = Object.keys(EXTENSIONS).find((kind) => type.startsWith(`${kind}/`) || (!type && EXTENSIONS[kind].test(name)));
  return media ?? (isOtherMedia({ type, name }) || /\.gguf$/i.test(name) ? undefined : "document");
}

/** Return a time as players show it: 0:07, 12:34. */
export const clock = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;

/**
 * Return an attachment of a file that this browser can read; else throw an Error with a message for the user. A document
 * has no more than about `context` tokens, if that is known; `remark(message)` is called for what the user should know.
 */
export async function attach(file, context = null, remark = () => {}) {
  const kind = kindOf(file);
  const name = file.name || { image: t("Image"), audio: t("Audio") }[kind] || t("Document");
  if (!kind) throw new Error(t("{name} is not an image, audio, a document or a model (.gguf).", { name }));
  if (kind === "document") return attachDocument(file, context, remark);
  const attachment = { id: randomId(), kind, name, blob: file };
  if (kind === "audio") return { ...attachment, seconds: (await samplesOf(attachment)).length / 16000 };
  try {
    (await createImageBitmap(file)).close();
  } catch {
    throw new Error(`${name} is damaged or not an image that this browser can read: use JPEG, PNG, GIF, WebP, AVIF or BMP.`);
  }
  return attachment;
}

async function attachDocument(file, context, remark) {
  const name = shownName(file.name);
  const { text, pages } = await readDocument(file, { remark });
  const tokens = tokensOf(text);
  if (context !== null && tokens > context) {
    const [has, fits] = [tokens, context].map((count) => count.toLocaleString(language));
    throw new Error(t("{name} has about {tokens} tokens, but conversation and reply together may have {context}: add it to Documents, where the passages that matter are found.", { name, tokens: has, context: fits }));
  }
  const blob = new Blob([text], { type: "text/plain" });
  return { id: randomId(), kind: "document", name, blob, nbytes: file.size, ...(pages && { pages }) };
}

/** Return the text of a document between marks that it does not hold itself, below its name. */
function quoted(name, text, pages) {
  const numbered = pages ? text.split(PAGE_END).map((page, at) => `[Page ${at + 1}]\n${page}`).join("\n\n") : text;
  const longest = Math.max(2, ...(numbered.match(/`{3,}/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `File: ${shownName(name)}\n${fence}\n${numbered.replace(/\n$/, "")}\n${fence}`;
}

const decoded = new WeakMap(); // promises of samples, by blob

/** Return the samples of audio at 16 kHz; throw an Error with a message for the user. */
export async function samplesOf({ name, blob }) {
  if (!decoded.has(blob)) decoded.set(blob, globalThis.webgemmaMedia.decodeAudio(blob, MAX_SECONDS));
  try {
    const { samples } = await decoded.get(blob);
    if (samples.length) return samples;
  } catch (error) {
    if (error.name === "long") throw new Error(t("{name} is longer than 3 hours: split it into shorter files.", { name }));
  }
  throw new Error(t("{name} is damaged, empty or not audio that this browser can play.", { name }));
}

/**
 * Return the content of a message: images and audio, of which `partOf` makes what an engine reads, then the text, which
 * begins with the documents.
 */
export async function contentOf({ content, attachments = [] }, partOf) {
  const lost = attachments.find(({ blob }) => !blob);
  if (lost) throw new Error(t("{name} is no longer stored in this browser: edit the message without it.", { name: lost.name }));
  const [documents, media] = [true, false].map((isDocument) => attachments.filter(({ kind }) => (kind === "document") === isDocument));
  const texts = await Promise.all(documents.map(async ({ name, blob, pages }) => quoted(name, await blob.text(), pages)));
  const text = [...texts, content].filter(Boolean).join("\n\n");
  if (!media.length) return text;
  const parts = await Promise.all(media.map(partOf));
  return text ? [...parts, { type: "text", text }] : parts;
}

const urls = new WeakMap(); // never revoked: the blob may be shown again

function urlOf(blob) {
  if (!urls.has(blob)) urls.set(blob, URL.createObjectURL(blob));
  return urls.get(blob);
}

/** Return the button of a document, which shows it. */
function documentButton({ name, blob, nbytes, pages }) {
  const size = sizeOf({ nbytes, pages });
  const open = async () => showDocument({ name, text: await blob.text(), pages }, { facts: size });
  const shown = button("", "document", open);
  shown.append(element("span", "name", name), element("span", "size", size));
  shown.title = t("Show {name}", { name });
  return shown;
}

/**
 * Return the element of an attachment: the image, the name of the audio, with a player if isPlayable, or the name of the
 * document, which shows it.
 */
export function attachmentElement({ kind, name, blob, seconds, nbytes, pages }, { isPlayable = false } = {}) {
  if (!blob) return element("span", "lost", t("{name} is no longer stored", { name }));
  if (kind === "document") return documentButton({ name, blob, nbytes, pages });
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
    removeButton.ariaLabel = t("Remove {name}", attachment);
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
export async function exportFileData({ blob, ...facts }) {
  return { ...attachmentFacts(facts), data: blob ? await asDataUrl(blob) : null };
}

/** Return what is known of an attachment besides its file. */
export const attachmentFacts = ({ id, kind, name, seconds, nbytes, pages }) =>
  (kind === "document" ? { id, kind, name, nbytes, ...(pages && { pages }) } : { id, kind, name, seconds });

const isCount = (value) => Number.isSafeInteger(value) && value >= 0;

/** Whether the facts of an exported attachment are valid. */
export function isAttachment(entry) {
  const { id, kind, name, seconds, nbytes, pages } = entry ?? {};
  const hasTexts = [id, name].every((text) => typeof text === "string" && text);
  const hasSize = kind !== "document" || (isCount(nbytes) && (pages === undefined || isCount(pages)));
  return hasTexts && KINDS.includes(kind) && hasSize && (kind === "audio") === Number.isFinite(seconds);
}

/** Return the file of an exported attachment, or undefined if it is not valid. */
export function fileBlob(url, kind) {
  const [, type, text] = String(url).match(/^data:([\w.+-]+\/[\w.+-]+)[^,]*;base64,([\w+/=]*)$/) ?? [];
  const types = kind === "document" ? ["text/plain"] : [type?.startsWith(`${kind}/`) ? type : null, "application/octet-stream"];
  if (text === undefined || !types.includes(type)) return undefined;
  try {
    return new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))], { type });
  } catch {
    return undefined; // not base64
  }
}
