// Model files the user brings: chosen, dropped, and those of this visit.

import { byId } from "./dom.js";

export const isModelFile = (file) => file?.name.toLowerCase().endsWith(".gguf");

/** `take(file)` gets what is chosen or dropped, `tell(sentence)` what is wrong with it. */
export class Files {
  constructor(take, tell) {
    this.take = take;
    this.tell = tell;
    this.visited = []; // the files of this visit, the newest first
    this.awaited = null; // {name, nbytes, take}: the one file that is to be chosen
    this.input = byId("model-file");
    byId("choose-file").addEventListener("click", () => this.choose());
    this.input.addEventListener("change", () => {
      if (this.input.files.length) this.hear(this.input.files[0]);
      this.input.value = ""; // the same file may be chosen again
    });
    this.takeDrops();
  }

  choose(awaited = null) {
    this.awaited = awaited;
    this.input.click();
  }

  /** Have this very file again, from this visit or chosen anew. */
  again(name, nbytes, take) {
    const known = this.visited.find((file) => file.name === name && file.size === nbytes);
    if (known) take(known);
    else this.choose({ name, nbytes, take });
  }

  hear(file) {
    const { awaited } = this;
    this.awaited = null;
    if (awaited && (file.name !== awaited.name || file.size !== awaited.nbytes)) {
      this.tell(`${file.name} is another file: choose the ${awaited.name} that was being kept, of ${awaited.nbytes} bytes.`, true);
      return;
    }
    if (!isModelFile(file)) {
      this.tell(`${file?.name ?? "This"} is no model: choose a file whose name ends in .gguf.`, true);
      return;
    }
    this.visited = [file, ...this.visited.filter((other) => other.name !== file.name || other.size !== file.size)];
    (awaited?.take ?? this.take)(file);
  }

  takeDrops() {
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
      this.awaited = null;
      this.hear(event.dataTransfer.files[0]);
    });
  }
}
