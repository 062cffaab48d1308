// Elements made of text, never of HTML, and sizes and times as people write them.

export const byId = (id) => document.getElementById(id);

/** An element with a class and children, also lists of them; strings become text. */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const child of children.flat()) made.append(child); // a list may be too long for one call
  return made;
}

/** A button with a name and what it does. */
export function button(name, className, act) {
  const made = element("button", className, name);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

/** A button that says to a screen reader also what it is about. */
export function namedButton(verb, name, className, act) {
  const made = button(verb, className, act);
  made.ariaLabel = `${verb} ${name}`;
  return made;
}

/** Bytes in powers of ten, as Ollama shows them: 7.2 GB. */
export function humanSize(nbytes) {
  const units = ["B", "kB", "MB", "GB"];
  let size = nbytes;
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size.toFixed(unit === 0 || size >= 99.5 ? 0 : 1)} ${units[unit]}`;
}

/** A time to wait: 40 s, 3 min, 1 h 20 min. */
export function humanSeconds(seconds) {
  if (seconds < 59.5) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Have the browser save a blob as a file. */
export function saveBlob(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = element("a");
  Object.assign(link, { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000); // not before the browser has read it
}

/** Put text on the clipboard and say so on the button that asked for it. */
export async function copyText(text, asker) {
  const name = asker.textContent;
  let outcome = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    outcome = "Not allowed"; // the browser or its user forbids it
  }
  asker.textContent = outcome;
  asker.disabled = true;
  setTimeout(() => {
    asker.textContent = name;
    asker.disabled = false;
  }, 1200);
}
