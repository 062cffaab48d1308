// The models this browser keeps for the page, as the worker tells them.

import { humanSize } from "./dom.js";

/** Dispatches "change". */
export class Stored extends EventTarget {
  constructor(engine) {
    super();
    this.engine = engine;
    this.models = []; // [{id, name, nbytes, have, whole, digest, eyes?, gpu_nbytes, gpu_least_nbytes}]
    this.freeNbytes = null; // what may still be stored, if it is known
    engine.addEventListener("stored", ({ detail }) => {
      this.models = detail.models;
      this.freeNbytes = detail.free_nbytes;
      this.dispatchEvent(new Event("change"));
    });
  }

  /** Ask the worker; the promise is kept when it has told. */
  async ask() {
    const told = new Promise((resolve) => this.addEventListener("change", resolve, { once: true }));
    this.engine.askStored();
    await told;
  }

  /** What is stored of a source, whole or in part. */
  copyOf({ kind, digest, file }) {
    return this.models.find((model) => (kind === "file"
      ? model.name === file.name && model.nbytes === file.size
      : model.digest !== null && model.digest === digest));
  }

  /** What to load for a source: its copy, if that is whole. */
  best(source) {
    const copy = source.kind === "url" ? this.copyOf(source) : undefined;
    if (!copy?.whole) return source;
    const { eyes } = source;
    return { kind: "stored", id: copy.id, name: copy.name, ...(eyes && !copy.eyes && { eyes }) };
  }

  /** The sentence why a source cannot be kept, or "". */
  shortage(name, nbytes, have) {
    const missing = nbytes - have;
    if (this.freeNbytes === null || missing <= this.freeNbytes) return "";
    return `${name} needs ${humanSize(missing)}, but this browser lets the page store only `
      + `${humanSize(this.freeNbytes)} more: delete a stored model, or make room on this device.`;
  }
}
