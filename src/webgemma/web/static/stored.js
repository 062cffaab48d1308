// Models stored in this browser: their list, and the copy that is in progress.

import { button, byId, element, humanSize } from "./dom.js";
import { t } from "./language.js";
import { TransferRate } from "./progress.js";

const RESUMABLE = t("What was copied stays: resume from the list of models.");
const STAGES = { copying: (name) => t("Storing {name}", { name }), checking: (name) => t("Checking {name}", { name }) };

/** The stored models as the worker last reported them. Dispatches "change". */
export class StoredModels extends EventTarget {
  constructor(engine) {
    super();
    this.engine = engine;
    this.models = []; // [{id, name, nbytes, stored_nbytes, complete, digest, mmproj, draft, gpu_nbytes, gpu_min_nbytes}]
    this.freeNbytes = null; // what may still be stored; null: unknown
    engine.addEventListener("stored_models", ({ detail }) => {
      this.models = detail.models;
      this.freeNbytes = detail.free_nbytes;
      this.dispatchEvent(new Event("change"));
    });
  }

  /** Request the list from the worker, and wait for it. */
  async refresh() {
    const changed = new Promise((resolve) => this.addEventListener("change", resolve, { once: true }));
    this.engine.listStored();
    await changed;
  }

  /** Return the stored copy of a source, complete or partial, or undefined. */
  copyOf({ kind, digest, file }) {
    return this.models.find((model) => (kind === "file"
      ? model.name === file.name && model.nbytes === file.size
      : model.digest !== null && model.digest === digest));
  }

  /**
   * Return the source to load: the stored copy if it is complete, else the source itself. A copy that was stored without
   * its drafter does without it, so that it loads offline.
   */
  preferCopy(source) {
    const copy = source.kind === "url" ? this.copyOf(source) : undefined;
    if (!copy?.complete) return source;
    const { mmproj } = source;
    return { kind: "stored", id: copy.id, name: copy.name, ...(mmproj && !copy.mmproj && { mmproj }) };
  }

  /** Return the message why `nbytes` bytes cannot be stored, or "" if they can. */
  shortage(name, nbytes, storedNbytes) {
    const missing = nbytes - storedNbytes;
    if (this.freeNbytes === null || missing <= this.freeNbytes) return "";
    return t("{name} needs {size}, but this browser lets the page store only {free} more: delete a stored model, or free disk space.", {
      name, size: humanSize(missing), free: humanSize(this.freeNbytes),
    });
  }
}

/** The display of a copy; screen readers announce every quarter of it. */
class CopyBox {
  constructor(cancel) {
    this.name = element("span", "name");
    this.cancel = button(t("Stop"), "quiet", cancel);
    this.cancel.setAttribute("aria-label", t("Stop storing"));
    this.bar = element("progress");
    this.facts = element("p", "transfer");
    this.box = element("div", "storing", element("div", "row", this.name, this.cancel), this.bar, this.facts);
    this.announcement = element("p", "visually-hidden");
    this.announcement.setAttribute("role", "status");
    this.hide();
  }

  show(title, { id, done, total }, facts) {
    this.box.hidden = false;
    this.name.textContent = title;
    this.bar.ariaLabel = title;
    this.cancel.disabled = id === null; // the worker has not started
    this.facts.textContent = facts;
    if (total) Object.assign(this.bar, { max: total, value: Math.min(done, total) });
    else this.bar.removeAttribute("value");
    const quarters = total ? Math.floor((4 * done) / total) : 0;
    const announcement = quarters ? t("{title}: {percent} %", { title, percent: 25 * quarters }) : title;
    if (this.announcement.textContent !== announcement) this.announcement.textContent = announcement;
  }

  hide() {
    this.box.hidden = true;
    this.announcement.textContent = "";
  }
}

/**
 * Copies models into the storage, one at a time. Dispatches "change" when a copy starts or ends;
 * calls `notify(message, isProblem)` for the user.
 */
export class ModelCopy extends EventTarget {
  constructor(engine, stored, notify) {
    super();
    this.engine = engine;
    this.stored = stored;
    this.notify = notify;
    this.current = null; // {id, name, stage, done, total}
    this.rate = new TransferRate();
    this.box = new CopyBox(() => engine.cancelStore(this.current.id));
    this.moveTo(byId("storing"));
    engine.addEventListener("storing", ({ detail }) => this.show(detail));
    engine.addEventListener("store_cancelled", () => this.end());
    engine.addEventListener("stored", ({ detail }) => {
      this.end();
      notify(t("{name} is stored in this browser: it loads from here, also offline.", { name: detail.name }));
    });
    engine.addEventListener("error", ({ detail }) => {
      if (detail.store === undefined) return;
      this.end();
      const isPartial = this.stored.models.some(({ id, stored_nbytes }) => id === detail.store && stored_nbytes > 0);
      notify(isPartial && detail.kind !== "storage" ? `${detail.message} ${RESUMABLE}` : detail.message, true);
    });
  }

  /** Show the progress in another element of the page. */
  moveTo(parent) {
    parent.append(this.box.box, this.box.announcement);
  }

  /** Copy a source, or resume its copy. */
  start(source) {
    if (this.current) return;
    const { name } = source.kind === "file" ? source.file : source;
    const files = [source, source.mmproj, source.draft].filter(Boolean);
    const nbytes = files.reduce((sum, { file, nbytes: size }) => sum + (file?.size ?? size), 0);
    const storedNbytes = files.reduce((sum, file) => sum + (this.stored.copyOf(file)?.stored_nbytes ?? 0), 0);
    const shortage = this.stored.shortage(name, nbytes, storedNbytes);
    if (shortage) {
      this.notify(shortage, true);
      return;
    }
    navigator.storage?.persist?.().catch(() => {}); // if refused, the browser may delete the copy when space is low
    this.engine.store(source);
    this.show({ id: null, name, stage: "copying", done: 0, total: 0 });
    this.dispatchEvent(new Event("change"));
  }

  show(copy) {
    const isOther = copy.id !== this.current?.id;
    if (copy.stage !== this.current?.stage) this.rate = new TransferRate();
    this.current = copy;
    const facts = copy.total ? this.rate.facts(copy.done, copy.total) : "";
    this.box.show(STAGES[copy.stage](copy.name), copy, facts);
    if (isOther) this.dispatchEvent(new Event("change"));
  }

  end() {
    this.current = null;
    this.box.hide();
    this.dispatchEvent(new Event("change"));
  }
}
