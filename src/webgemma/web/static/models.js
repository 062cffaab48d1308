// The models one can choose: the bundled one, those of Ollama on this machine, a file.

import { byId, button, element, humanSize } from "./dom.js";
import { showNotice } from "./notice.js";

export const BUNDLED = { name: "Bundled model", source: { kind: "bundled" } };

const fromFile = (file) => ({ name: file.name, source: { kind: "file", file } });

function fromStore({ name, url, digest, nbytes }) {
  return { name, source: { kind: "url", url, name, digest, nbytes } };
}

async function storeModels() {
  const response = await fetch("/api/models");
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

/** The dialog; calls `choose({name, source})`. */
export class ModelPicker {
  constructor(choose) {
    this.current = null; // the name of the model that is loaded
    this.dialog = byId("models-dialog");
    this.choose = (model) => {
      this.dialog.close();
      choose(model);
    };
    const input = byId("model-file");
    byId("model-button").addEventListener("click", () => this.open());
    byId("choose-file").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      if (input.files.length) this.choose(fromFile(input.files[0]));
      input.value = ""; // the same file may be chosen again
    });
    this.takeDrops();
  }

  async open() {
    this.dialog.showModal();
    const state = byId("models-state");
    const items = [this.item(BUNDLED, "small, comes with webgemma")];
    byId("models").replaceChildren(...items);
    byId("problems").replaceChildren();
    state.textContent = "Looking for models of Ollama …";
    try {
      const { models, problems } = await storeModels();
      byId("models").replaceChildren(...items, ...models.map((model) => this.storeItem(model)));
      byId("problems").replaceChildren(...problems.map((text) => element("li", "", text)));
      state.textContent = models.length ? "" : "Ollama has no models here. Get one with: ollama pull gemma4:e2b";
    } catch (error) {
      state.textContent = `The models of Ollama cannot be listed: ${error.message}`;
    }
  }

  storeItem(model) {
    const facts = [model.family, model.parameters, model.quantisation].filter(Boolean).join(" · ");
    const item = this.item(fromStore(model), facts, model.problem ? "" : humanSize(model.nbytes));
    if (model.problem) {
      item.firstChild.disabled = true;
      item.append(element("p", "problem", model.problem));
    }
    return item;
  }

  item(model, facts, size = "") {
    const choice = button("", "model", () => this.choose(model));
    choice.append(element("span", "name", model.name), element("span", "size", size), element("span", "facts", facts));
    if (model.name === this.current) choice.setAttribute("aria-current", "true");
    return element("li", "", choice);
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
      const [file] = event.dataTransfer.files;
      if (file?.name.toLowerCase().endsWith(".gguf")) this.choose(fromFile(file));
      else showNotice(`${file?.name ?? "This"} is no model: drop a file whose name ends in .gguf.`);
    });
  }
}
