// The list of adapters that were trained in this browser: apply, turn off, download, delete.

import { byId, element, humanSize, namedButton, saveBlob } from "./dom.js";
import { confirmed } from "./question.js";

/** The list in the fine-tuning dialog. */
export class AdapterList {
  constructor(engine) {
    this.engine = engine;
    this.adapters = [];
    this.appliedId = null;
    this.downloads = new Map(); // names by id, of files that were requested
    engine.addEventListener("adapters", ({ detail }) => this.show(detail.adapters));
    engine.addEventListener("adapter_applied", ({ detail }) => this.show(this.adapters, detail.id));
    engine.addEventListener("loaded", () => this.show(this.adapters, null));
    engine.addEventListener("adapter_file", ({ detail }) => {
      if (this.downloads.has(detail.id)) saveBlob(detail.blob, `${this.downloads.get(detail.id)}.gguf`);
      this.downloads.delete(detail.id);
    });
  }

  show(adapters = this.adapters, appliedId = this.appliedId) {
    this.adapters = adapters;
    this.appliedId = appliedId;
    const key = document.activeElement?.closest("#adapters") && document.activeElement.dataset.key;
    byId("adapters-title").hidden = adapters.length === 0;
    byId("adapters").replaceChildren(...adapters.map((adapter) => this.item(adapter)));
    if (!key) return; // else the focus stays on the same button
    const again = [...byId("adapters").querySelectorAll("button")].find((other) => other.dataset.key === key);
    (again && !again.disabled ? again : byId("tune-title")).focus();
  }

  item(adapter) {
    const { id, name, nbytes, base, steps, loss, held_out_loss, stored } = adapter;
    const isApplied = this.appliedId === id;
    const facts = [
      isApplied && "applied", base && `for ${base}`, steps && `${steps} steps`, typeof loss === "number" && `loss ${loss.toFixed(2)}`,
      typeof held_out_loss === "number" && `held-out loss ${held_out_loss.toFixed(2)}`, humanSize(nbytes),
    ];
    const apply = namedButton(isApplied ? "Turn off" : "Apply", name, isApplied ? "quiet" : "", () => this.engine.applyAdapter(isApplied ? null : id));
    apply.disabled = this.engine.isTuning || this.engine.state !== "loaded";
    const download = namedButton("Download", name, "quiet", () => {
      this.downloads.set(id, name);
      this.engine.readAdapter(id);
    });
    const remove = namedButton("Delete", name, "quiet", () => this.remove(adapter));
    [apply, download, remove].forEach((control, at) => { control.dataset.key = `${id} ${at}`; });
    const description = element("div", "adapter", element("span", "name", name), element("span", "facts", facts.filter(Boolean).join(" · ")));
    const item = element("li", isApplied ? "applied" : "", description, element("div", "acts", apply, download, remove));
    if (!stored) item.append(element("p", "problem", "The storage is full: this adapter is lost when the page is closed. Download it."));
    return item;
  }

  async remove({ id, name }) {
    if (!await confirmed(`Delete the adapter ${name} from this browser?`, "Delete")) return;
    if (this.appliedId === id) this.engine.applyAdapter(null);
    this.engine.deleteAdapter(id);
  }
}
