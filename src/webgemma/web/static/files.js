// Model files the user brings: chosen, dropped, and those of this visit.

import { byId } from "./dom.js";

export const isModelFile = (file) => file?.name.toLowerCase().endsWith(".gguf");

/** Whether a file holds only the eyes and ears of a model, as llama.cpp names it. */
const isEyes = (file) => /mmproj/i.test(file.name);

/** `acts` has take(file, eyes), addEyes(file), and tell(sentence) for what is wrong with a file. */
export class Files {
  constructor(acts) {
    this.acts = acts;
    this.visited = []; // the files of this visit, the newest first
    this.eyes = new WeakMap(); // of those, the eyes that came with them
    this.awaited = null; // {name, nbytes, take}: the one file that is to be chosen
    this.input = byId("model-file");
    byId("choose-file").addEventListener("click", () => this.choose());
    this.input.addEventListener("change", () => {
      if (this.input.files.length) this.hear([...this.input.files]);
      this.input.value = ""; // the same file may be chosen again
    });
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

  /** A model, its eyes, or both at once. */
  hear(files) {
    const { awaited } = this;
    this.awaited = null;
    const eyes = files.find(isEyes);
    const file = files.find((other) => other !== eyes) ?? eyes;
    if (awaited && (file.name !== awaited.name || file.size !== awaited.nbytes)) {
      this.acts.tell(`${file.name} is another file: choose the ${awaited.name} that was being kept, of ${awaited.nbytes} bytes.`, true);
      return;
    }
    if (!isModelFile(file)) {
      this.acts.tell(`${file?.name ?? "This"} is no model: choose a file whose name ends in .gguf.`, true);
      return;
    }
    if (file === eyes && !awaited) {
      this.acts.addEyes(eyes);
      return;
    }
    this.visited = [file, ...this.visited.filter((other) => other.name !== file.name || other.size !== file.size)];
    if (eyes && eyes !== file) this.eyes.set(file, eyes);
    (awaited?.take ?? this.acts.take)(file);
  }
}
