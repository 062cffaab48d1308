// Keys for the whole page, and the dialog that lists them.

import { byId } from "./dom.js";

const isMac = /Mac|iPhone|iPad/.test(navigator.platform);

const isTyping = (target) => target.matches?.("input, textarea, select, [contenteditable]");

/** `actions` has search(), startNew() and editLast(), which returns whether there was something to edit. */
export function listenToKeys(actions) {
  const dialog = byId("keys-dialog");
  for (const key of dialog.querySelectorAll(".modifier")) key.textContent = isMac ? "⌘" : "Ctrl";
  byId("keys-button").addEventListener("click", () => dialog.showModal());
  document.body.addEventListener("keydown", (event) => {
    if (event.isComposing || event.altKey || document.querySelector("dialog[open]")) return;
    const { key, target, shiftKey } = event;
    const hasModifier = isMac ? event.metaKey : event.ctrlKey;
    const letter = key.toLowerCase();
    if (hasModifier && !shiftKey && letter === "k") actions.search();
    else if (hasModifier && shiftKey && letter === "o") actions.startNew();
    else if (hasModifier || event.ctrlKey || event.metaKey) return;
    else if (key === "?" && !isTyping(target)) dialog.showModal();
    else if (key !== "ArrowUp" || shiftKey || target.id !== "prompt" || target.value || !actions.editLast()) return;
    event.preventDefault();
  });
}
