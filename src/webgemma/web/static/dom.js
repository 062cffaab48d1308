// Helpers for the DOM (elements from text, never from HTML), for ids, sizes and times.

import { decimal, language, t } from "./language.js";

export const byId = (id) => document.getElementById(id);

/** Return an element with a class and children (nodes, strings, or lists of them). */
export function element(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  for (const child of children.flat()) node.append(child); // append(...list) has an argument limit
  return node;
}

/** Return a button with a label and a click handler. */
export function button(name, className, act) {
  const node = element("button", className, name);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
}

/** Return a button whose accessible name also names its object: "Delete" and "Delete gemma4:e2b". */
export function namedButton(name, label, className, act) {
  const node = button(name, className, act);
  node.ariaLabel = label;
  return node;
}

/** Return a new id; `crypto.randomUUID` is missing on pages that another machine serves without TLS. */
export const randomId = () => crypto.getRandomValues(new Uint8Array(16)).reduce((id, byte) => id + byte.toString(16).padStart(2, "0"), "");

const UNITS = ["kilobyte", "megabyte", "gigabyte"];

/** Format a number of bytes in powers of ten, as Ollama does: 7.2 GB. */
export function humanSize(nbytes) {
  if (nbytes < 999.5) return t("{count} B", { count: decimal(nbytes, 0) });
  let size = nbytes / 1000;
  let unit = 0;
  while (size >= 999.5 && unit < UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  const digits = size >= 99.5 ? 0 : 1;
  return size.toLocaleString(language, { style: "unit", unit: UNITS[unit], minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Format a duration: 40 s, 3 min, 1 h 20 min. */
export function humanSeconds(seconds) {
  if (seconds < 59.5) return t("{seconds} s", { seconds: Math.max(1, Math.round(seconds)) });
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return t("{minutes} min", { minutes });
  return t("{hours} h {minutes} min", { hours: Math.floor(minutes / 60), minutes: minutes % 60 });
}

/** Download a blob as a file. */
export function saveBlob(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = element("a");
  Object.assign(link, { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000); // after the browser has read it
}

/** Copy text as browsers do for pages without TLS, which have no `navigator.clipboard`. */
function copySelection(text) {
  const box = element("textarea", "visually-hidden");
  box.value = text;
  document.body.append(box);
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  if (!isCopied) throw new Error("not allowed");
}

/** Copy text to the clipboard, and show the outcome on the button for a moment. */
export async function copyText(text, copyButton) {
  const name = copyButton.textContent;
  let outcome = t("Copied");
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelection(text);
  } catch {
    outcome = t("Not allowed"); // by the browser or the user
  }
  copyButton.textContent = outcome;
  copyButton.disabled = true;
  setTimeout(() => {
    copyButton.textContent = name;
    copyButton.disabled = false;
  }, 1200);
}
