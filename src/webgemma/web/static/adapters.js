// The list of adapters that were trained in this browser: apply, turn off, download, delete.

import { byId, element, humanSize, namedButton, saveBlob } from "./dom.js";
import { decimal, plural, t } from "./language.js";
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
      isApplied && t("applied"), base && t("for {base}", { base }), steps && plural(steps, "{count} step", "{count} steps"),
      typeof loss === "number" && t("loss {loss}", { loss: decimal(loss, 2) }),
      typeof held_out_loss === "number" && t("held-out loss {loss}", { loss: decimal(held_out_loss, 2) }), humanSize(nbytes),
    ];
    const apply = isApplied
      ? namedButton(t("Turn off"), t("Turn off {name}", { name }), "quiet", () => this.engine.applyAdapter(null))
      : namedButton(t("Apply"), t("Apply {name}", { name }), "", () => this.engine.applyAdapter(id));
    apply.disabled = this.engine.isTuning || this.engine.state !== "loaded";
    const download = namedButton(t("Download"), t("Download {name}", { name }), "quiet", () => {
      this.downloads.set(id, name);
      this.engine.readAdapter(id);
    });
    const remove = namedButton(t("Delete"), t("Delete {name}", { name }), "quiet", () => this.remove(adapter));
    [apply, download, remove].forEach((control, at) => { control.dataset.key = `${id} ${at}`; });
    const description = element("div", "adapter", element("span", "name", name), element("span", "facts", facts.filter(Boolean).join(" · ")));
    const item = element("li", isApplied ? "applied" : "", description, element("div", "acts", apply, download, remove));
    if (!stored) item.append(element("p", "problem", t("The storage is full: this adapter is lost when the page is closed. Download it.")));
    return item;
  }

  async remove({ id, name }) {
    if (!await confirmed(t("Delete the adapter {name} from this browser?", { name }), t("Delete"))) return;
    if (this.appliedId === id) this.engine.applyAdapter(null);
    this.engine.deleteAdapter(id);
  }
}
