// Files that are dropped anywhere on the page.

import { byId } from "./dom.js";
import { isModelFile } from "./files.js";

/** `models(files)` gets those that are models, `others(files)` the rest. */
export function takeDrops(models, others) {
  const hint = byId("drop-here");
  const hasFile = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!hasFile(event)) return;
    event.preventDefault();
    hint.hidden = false;
  });
  addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) hint.hidden = true;
  });
  addEventListener("drop", (event) => {
    hint.hidden = true;
    if (!hasFile(event)) return;
    event.preventDefault();
    const files = [...event.dataTransfer.files];
    const chosen = files.filter(isModelFile);
    const rest = files.filter((file) => !isModelFile(file));
    if (chosen.length) models(chosen);
    if (rest.length) others(rest);
  });
}
