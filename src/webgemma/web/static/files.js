// Files that the user chooses or drops: model files, and the sorting of everything that is dropped on the page.

import { byId } from "./dom.js";
import { droppedFolders, filesIn } from "./folders.js";
import { droppedFiles } from "./handles.js";
import { t } from "./language.js";

export const isModelFile = (file) => file?.name.toLowerCase().endsWith(".gguf");

/** Whether a file holds only the encoders of a model: llama.cpp's naming. */
const isMmproj = (file) => /mmproj/i.test(file.name);

/** Whether a file holds training examples; while the fine-tuning dialog is open, any but a model does. */
const isExamples = (file) => /\.jsonl$/i.test(file.name) || (byId("tune-dialog").open && !isModelFile(file));

/**
 * The model files that the user has chosen. `actions` has load(file), which returns a promise of whether it is a
 * model, addMmproj(file), and notify(message, isProblem) for what is wrong with a file.
 */
export class ModelFiles {
  constructor(actions) {
    this.actions = actions;
    this.chosen = []; // since the page was opened, the latest first
    this.mmprojs = new WeakMap(); // of those, the mmproj files chosen with them
    this.expected = null; // {name, nbytes, use}: the only file that the next choice may be
    this.input = byId("model-file");
    byId("choose-file").addEventListener("click", () => this.choose());
    this.input.addEventListener("change", () => {
      if (this.input.files.length) this.add([...this.input.files]);
      this.input.value = ""; // the same file may be chosen again
    });
  }

  choose(expected = null) {
    this.expected = expected;
    this.input.click();
  }

  /** Call `use` with this very file: one that was chosen before, or that the user chooses again. */
  request(name, nbytes, use) {
    const known = this.chosen.find((file) => file.name === name && file.size === nbytes);
    if (known) use(known);
    else this.choose({ name, nbytes, use });
  }

  /** Take a model, an mmproj file, or both at once. */
  add(files) {
    const { expected } = this;
    this.expected = null;
    const mmproj = files.find(isMmproj);
    const file = files.find((other) => other !== mmproj) ?? mmproj;
    if (expected && (file.name !== expected.name || file.size !== expected.nbytes)) {
      this.actions.notify(t("{name} is another file: choose the {expected} whose copy is to be resumed, of {nbytes} bytes.", { name: file.name, expected: expected.name, nbytes: expected.nbytes }), true);
      return;
    }
    if (!isModelFile(file)) {
      this.actions.notify(t("{name} is not a model: choose a file whose name ends in .gguf.", { name: file.name }), true);
      return;
    }
    if (file === mmproj && !expected) {
      this.actions.addMmproj(mmproj);
      return;
    }
    this.use(file, mmproj === file ? undefined : mmproj, expected?.use);
  }

  /** Use a file, and return whether it is a model; then it is listed. */
  async use(file, mmproj, use = this.actions.load) {
    if (mmproj) this.mmprojs.set(file, mmproj);
    if (await use(file) === false) return false;
    this.chosen = [file, ...this.chosen.filter((other) => other.name !== file.name || other.size !== file.size)];
    return true;
  }
}

/**
 * Sort files that are dropped anywhere on the page into `models(files)`, `examples(files)` and `others(files)`. Folders,
 * and all but models while the dialog of the documents is open, go to `documents(files)`: a promise of the files.
 */
export function handleDrops({ models, examples, others, documents }) {
  const hint = byId("drop-here");
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    hint.hidden = false;
  });
  addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) hint.hidden = true;
  });
  addEventListener("drop", (event) => {
    hint.hidden = true;
    if (!hasFiles(event)) return;
    event.preventDefault();
    const folders = droppedFolders(event.dataTransfer);
    const dropped = droppedFiles(event.dataTransfer).filter((_, at) => !folders[at]);
    const modelFiles = dropped.filter(isModelFile);
    const isSearched = byId("documents-dialog").open;
    const searched = isSearched ? dropped.filter((file) => !isModelFile(file)) : [];
    if (searched.length || folders.some(Boolean)) documents(filesIn(folders.filter(Boolean), searched));
    const files = isSearched ? modelFiles : dropped;
    const exampleFiles = files.filter(isExamples);
    const otherFiles = files.filter((file) => !isModelFile(file) && !isExamples(file));
    if (modelFiles.length) models(modelFiles);
    if (exampleFiles.length) examples(exampleFiles);
    if (otherFiles.length) others(otherFiles);
  });
}
