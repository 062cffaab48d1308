// Files that are dropped anywhere on the page.

import { byId } from "./dom.js";
import { isModelFile } from "./files.js";

/** Whether a file is to be learnt from: where examples are asked for, whatever it is. */
const isExamples = (file) => /\.jsonl$/i.test(file.name) || (byId("tune-dialog").open && !isModelFile(file));

/** `models(files)` gets those that are models, `examples(files)` those to learn from, `others(files)` the rest. */
export function takeDrops({ models, examples, others }) {
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
    const learnt = files.filter(isExamples);
    const rest = files.filter((file) => !isModelFile(file) && !isExamples(file));
    if (chosen.length) models(chosen);
    if (learnt.length) examples(learnt);
    if (rest.length) others(rest);
  });
}
