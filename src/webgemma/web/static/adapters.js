// The adapters that were trained here: put on, taken off, saved as files, deleted.

import { byId, element, humanSize, namedButton, saveBlob } from "./dom.js";
import { confirmed } from "./question.js";

/** The list in the dialog. */
export class AdapterList {
  constructor(engine) {
    this.engine = engine;
    this.adapters = [];
    this.on = null; // the id of what is on
    this.saving = new Map(); // id -> name, of files that were asked for
    engine.addEventListener("adapters", ({ detail }) => this.show(detail.adapters));
    engine.addEventListener("adapted", ({ detail }) => this.show(this.adapters, detail.id));
    engine.addEventListener("loaded", () => this.show(this.adapters, null));
    engine.addEventListener("adapter", ({ detail }) => {
      if (this.saving.has(detail.id)) saveBlob(detail.blob, `${this.saving.get(detail.id)}.gguf`);
      this.saving.delete(detail.id);
    });
  }

  show(adapters = this.adapters, on = this.on) {
    this.adapters = adapters;
    this.on = on;
    const key = document.activeElement?.closest("#adapters") && document.activeElement.dataset.key;
    byId("adapters-title").hidden = adapters.length === 0;
    byId("adapters").replaceChildren(...adapters.map((adapter) => this.item(adapter)));
    if (!key) return; // whoever is at a button stays there
    const again = [...byId("adapters").querySelectorAll("button")].find((other) => other.dataset.key === key);
    (again && !again.disabled ? again : byId("tune-title")).focus();
  }

  item(adapter) {
    const { id, name, nbytes, base, steps, loss, judged, kept } = adapter;
    const isOn = this.on === id;
    const facts = [
      isOn && "on", base && `for ${base}`, steps && `${steps} steps`, typeof loss === "number" && `loss ${loss.toFixed(2)}`,
      typeof judged === "number" && `held out ${judged.toFixed(2)}`, humanSize(nbytes),
    ];
    const apply = namedButton(isOn ? "Take off" : "Apply", name, isOn ? "quiet" : "", () => this.engine.adapt(isOn ? null : id));
    apply.disabled = this.engine.isLearning || this.engine.state !== "loaded";
    const save = namedButton("Download", name, "quiet", () => {
      this.saving.set(id, name);
      this.engine.askAdapter(id);
    });
    const remove = namedButton("Delete", name, "quiet", () => this.remove(adapter));
    [apply, save, remove].forEach((control, at) => { control.dataset.key = `${id} ${at}`; });
    const what = element("div", "adapter", element("span", "name", name), element("span", "facts", facts.filter(Boolean).join(" · ")));
    const item = element("li", isOn ? "on" : "", what, element("div", "acts", apply, save, remove));
    if (!kept) item.append(element("p", "problem", "There was no room to store it: it goes with this page. Download it."));
    return item;
  }

  async remove({ id, name }) {
    if (!await confirmed(`Delete the adapter ${name} from this browser?`, "Delete")) return;
    if (this.on === id) this.engine.adapt(null);
    this.engine.forgetAdapter(id);
  }
}
