// Documents as text: files that are text in any encoding, web pages, and PDF, which a worker reads.
//
// The text of a PDF has its pages apart by form feeds; any other has lines only.

import { humanSize } from "./dom.js";
import { language, plural, t } from "./language.js";

export const PAGE_END = "\f";
const MAX_TEXT_NBYTES = 8e6; // as in search/documents.py
const MAX_PDF_NBYTES = 100e6;
const MAX_CHARS = 8e6;
const MAX_PAGES = 3000;
const MAX_SECONDS = 60; // for a PDF
const LOOKED_AT_NBYTES = 1 << 16; // of a file, to see whether it is text

const PDF = /\.pdf$/i;
const HTML = /\.(html?|xhtml)$/i;
// Files that systems take for video, and other text whose type says something else.
const SOURCE = /\.(m?ts|mts|cts|svg|rs|tex|csv|json|xml|ya?ml|toml|log|md|txt)$/i;

const isPdf = ({ name, type }) => type === "application/pdf" || PDF.test(name);

/** Whether a file's name or type says that it is no document. */
export const isOtherMedia = ({ name, type }) => !SOURCE.test(name) && /^(image|audio|video|font|model)\//.test(type);

const refuse = (message) => { throw new Error(message); };

/** Return a number of tokens in words: about 4 bytes of UTF-8 are one, in any language. */
export const tokensOf = (text) => Math.ceil(new Blob([text]).size / 4);

/** Return how large a document is, in words: "12 kB", "3 pages". */
export function sizeOf({ nbytes, pages }) {
  return pages ? plural(pages, "{count} page", "{count} pages") : humanSize(nbytes);
}

/** Return a name in a line: what nobody would see, or what would reorder it, is left out. */
export const shownName = (name) => name.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "").trim() || t("Document");

/**
 * Return {text, title, pages?} of a file; `pages` is the number of a PDF's. Throws an Error with a message for the
 * user, and calls `remark(message)` for what the user should know. The tags of a web page are left out `asPage`.
 */
export async function readDocument(file, { remark = () => {}, asPage = false } = {}) {
  const name = shownName(file.name);
  const max = isPdf(file) ? MAX_PDF_NBYTES : MAX_TEXT_NBYTES;
  if (file.size > max) refuse(t("{name} has {size}, but a document may have {max}: split it.", { name, size: humanSize(file.size), max: humanSize(max) }));
  let bytes;
  try {
    bytes = new Uint8Array(await file.arrayBuffer());
  } catch {
    refuse(t("{name} cannot be read: it was moved, changed or deleted, or you may not read it.", { name }));
  }
  if (isPdf(file) || startsWith(bytes, [0x25, 0x50, 0x44, 0x46, 0x2d])) return readPdf(bytes, name, remark);
  const { text, encoding } = decoded(bytes) ?? refuse(t("{name} is neither text nor a PDF: save it as one of them.", { name }));
  const lines = text.replace(/\r\n?/g, "\n");
  if (!lines.trim()) refuse(t("{name} is empty.", { name }));
  if (encoding === "windows-1252") remark(t("{name} is not UTF-8: it was read as Windows-1252. If letters are wrong, save it as UTF-8.", { name }));
  return asPage && HTML.test(file.name) ? readWebPage(lines, name) : { text: lines, title: "" };
}

const startsWith = (bytes, mark) => mark.every((byte, at) => bytes[at] === byte);

/** Return {text, encoding}, or null for what is not text. */
function decoded(bytes) {
  const marked = startsWith(bytes, [0xff, 0xfe]) ? "utf-16le" : startsWith(bytes, [0xfe, 0xff]) ? "utf-16be" : null;
  if (!marked && isBinary(bytes.subarray(0, LOOKED_AT_NBYTES))) return null;
  for (const encoding of marked ? [marked] : ["utf-8", "windows-1252"]) {
    try {
      const text = new TextDecoder(encoding, { fatal: encoding !== "windows-1252" }).decode(bytes);
      return marked && text.includes("\0") ? null : { text, encoding }; // UTF-32 begins as UTF-16 does
    } catch { /* another one */ }
  }
  return null;
}

/** Whether bytes hold what no text does: a NUL, or many control characters. */
function isBinary(bytes) {
  let controls = 0;
  for (const byte of bytes) {
    if (byte === 0) return true;
    if (byte < 7 || (byte > 13 && byte < 27) || (byte > 27 && byte < 32) || byte === 127) controls += 1;
  }
  return controls > bytes.length / 100;
}

/** Read a PDF in a worker that is ended when it has taken too long. */
async function readPdf(bytes, name, remark) {
  const worker = new Worker(new URL("./pdf_worker.js", import.meta.url), { type: "module" });
  let timer;
  try {
    const found = await new Promise((resolve, reject) => {
      const fail = (message) => reject(new Error(message));
      timer = setTimeout(() => fail(t("{name} takes more than {seconds} seconds to read: split it.", { name, seconds: MAX_SECONDS })), 1000 * MAX_SECONDS);
      worker.onerror = (event) => {
        event.preventDefault();
        fail(t("{name} cannot be read: what reads PDF files did not start. Reload the page.", { name }));
      };
      worker.onmessage = ({ data }) => {
        if (data.ready) worker.postMessage({ data: bytes.buffer, maxPages: MAX_PAGES, maxChars: MAX_CHARS }, [bytes.buffer]);
        else if (data.problem === "password") fail(t("{name} is protected by a password: save it without one.", { name }));
        else if (data.problem === "long") fail(t("{name} has more than {count} characters: split it.", { name, count: MAX_CHARS.toLocaleString(language) }));
        else if (data.problem) fail(t("{name} is damaged or not a PDF that can be read.", { name }));
        else if (data.texts) resolve(data);
      };
    });
    const { title, texts, pages } = found;
    if (!texts.some(Boolean)) refuse(t("{name} has no text: its pages are images, as those of a scan are. Attach images of the pages instead.", { name }));
    if (texts.length < pages) remark(t("{name} has {pages} pages, of which the first {count} were read.", { name, pages, count: texts.length }));
    return { text: texts.join(PAGE_END), title: shownTitle(title), pages: texts.length };
  } finally {
    clearTimeout(timer);
    worker.terminate();
  }
}

const shownTitle = (title) => title.replace(/[\p{C}\s]+/gu, " ").trim().slice(0, 200);

const HIDDEN = new Set(["SCRIPT", "STYLE", "TEMPLATE", "NOSCRIPT", "SVG", "MATH", "IFRAME", "OBJECT", "HEAD"]);
const APART = new Set(["P", "H1", "H2", "H3", "H4", "H5", "H6", "TABLE", "BLOCKQUOTE", "PRE", "UL", "OL", "DL", "SECTION", "ARTICLE"]);
const BLOCKS = new Set([
  "ADDRESS", "ASIDE", "BR", "CAPTION", "CENTER", "DD", "DETAILS", "DIALOG", "DIV", "DT", "FIELDSET", "FIGCAPTION", "FIGURE",
  "FOOTER", "FORM", "HEADER", "HR", "LI", "MAIN", "NAV", "SUMMARY", "TR",
]);

/** Return what a web page says, without its tags; nothing of it is run or loaded. */
function readWebPage(source, name) {
  const page = new DOMParser().parseFromString(source, "text/html");
  const parts = [];
  const separate = ({ tagName }) => {
    if (APART.has(tagName)) parts.push("\n\n");
    else if (BLOCKS.has(tagName)) parts.push("\n");
    else if (tagName === "TD" || tagName === "TH") parts.push(" ");
  };
  let node = page.body;
  while (node) { // without recursion: a page may be deep
    if (node.nodeType === Node.TEXT_NODE) parts.push(node.data.replace(/\s+/g, " "));
    else if (node.nodeType === Node.ELEMENT_NODE) separate(node);
    const isEntered = node.firstChild && !HIDDEN.has(node.tagName?.toUpperCase());
    if (isEntered) {
      node = node.firstChild;
      continue;
    }
    while (node && node !== page.body && !node.nextSibling) {
      node = node.parentNode;
      separate(node);
    }
    node = node === page.body ? null : node?.nextSibling;
  }
  const text = parts.join("").replace(/ *\n */g, "\n").replace(/\n{3,}/g, "\n\n").replace(/ {2,}/g, " ").trim();
  if (!text) refuse(t("{name} has no text.", { name }));
  return { text, title: shownTitle(page.title) };
}
