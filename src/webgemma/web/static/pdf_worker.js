// Reads the text of one PDF with PDF.js, in a worker that is ended afterwards: the file may be a stranger's. A request
// is {data: ArrayBuffer, maxPages, maxChars}. Messages: {page, pages} while it reads, then {title, texts, pages}, or
// {problem: "password" | "damaged" | "long"}.

import { getDocument } from "./lib/pdfjs/pdfjs.mjs";

/** Return the text of a page, with its lines. */
async function textOf(page) {
  const { items } = await page.getTextContent();
  return items.map(({ str = "", hasEOL }) => (hasEOL ? `${str}\n` : str)).join("")
    .replace(/\p{Cs}|[\0\f\uFFFE\uFFFF]/gu, "\uFFFD") // what a wrong font makes of letters
    .replace(/[^\S\n]+$/gm, "").trim();
}

async function read({ data, maxPages, maxChars }) {
  const loading = getDocument({
    data: new Uint8Array(data),
    isEvalSupported: false, // the policy of the page forbids it, too
    useSystemFonts: false,
    disableFontFace: true,
    enableXfa: false,
    stopAtErrors: false,
    verbosity: 0,
  });
  const file = await loading.promise;
  const { info } = await file.getMetadata().catch(() => ({}));
  const texts = [];
  let length = 0;
  for (let number = 1; number <= Math.min(file.numPages, maxPages); number += 1) {
    const page = await file.getPage(number);
    texts.push(await textOf(page));
    page.cleanup();
    length += texts.at(-1).length;
    if (length > maxChars) return { problem: "long" };
    postMessage({ page: number, pages: file.numPages });
  }
  return { title: typeof info?.Title === "string" ? info.Title : "", texts, pages: file.numPages };
}

onmessage = async ({ data }) => {
  try {
    postMessage(await read(data));
  } catch (error) {
    postMessage({ problem: error?.name === "PasswordException" ? "password" : "damaged" });
  }
};
postMessage({ ready: true });
