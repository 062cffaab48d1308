// Models: the dialog to choose one (stored in this browser, in Ollama's store, or a file), whether each fits the
// GPU, and the model of the last visit.
//
// A model is {name, source}; a source is what tab_engine.js describes, with `mmproj` for the file of its encoders and
// `draft` for that of its drafter.

import { byId, element, humanSize, namedButton } from "./dom.js";
import { isModelFile, ModelFiles } from "./files.js";
import { keepHandles } from "./handles.js";
import { t } from "./language.js";
import { modelButton } from "./model_button.js";
import { showNotice } from "./notice.js";
import { confirmed } from "./question.js";
import { isHosted, scoped } from "./scope.js";
import { ModelCopy, StoredModels } from "./stored.js";

export const BUNDLED = { name: t("Bundled model"), source: { kind: "bundled" } };

const NO_SERVER = isHosted
  ? t("The models of this page are not available, because its server does not respond. The models in this browser work without it.")
  : t("Ollama’s models are not available, because `webgemma web` is not running. The models in this browser work without it.");
const NO_MODELS = t("Ollama has no models on this machine. Get one with: {command}", { command: "ollama pull gemma4:e2b" });
const TOO_LARGE = t("too large for this GPU");

const fromFile = (file, mmproj) => ({
  name: file.name,
  source: { kind: "file", file, ...(mmproj && { mmproj: { kind: "file", file: mmproj } }) },
});
const fromStored = ({ id, name }) => ({ name, source: { kind: "stored", id, name } });
const fromOllama = ({ name, url, digest, nbytes, projectors: [mmproj] = [], draft }) => ({
  name,
  source: {
    kind: "url", url, name, digest, nbytes,
    ...(mmproj && { mmproj: { kind: "url", name: `${name} (mmproj)`, ...mmproj } }),
    ...(draft && { draft: { kind: "url", name: `${name} (drafter)`, ...draft } }),
  },
});

const isSame = (one, other) => one.kind === other.kind
  && one.id === other.id && one.url === other.url && one.file === other.file;

/** Return in words whether a model fits the GPU; "" if that is unknown. */
function fitOf({ gpu_nbytes: nbytes, gpu_min_nbytes: minNbytes }, gpuNbytes) {
  if (nbytes === null || nbytes === undefined || gpuNbytes === null) return "";
  if (nbytes <= gpuNbytes) return t("fits");
  return (minNbytes ?? nbytes) <= gpuNbytes ? t("fits, a little slower") : TOO_LARGE;
}

/** How many bytes the GPU can hold, measured by the worker. */
class GpuMemory {
  constructor(engine) {
    this.engine = engine;
    this.nbytes = null; // unknown
    engine.addEventListener("gpu_memory", ({ detail }) => { this.nbytes = detail.nbytes; });
  }

  /** Measure up to the size of the largest of these models, and wait for the result. */
  async probe(models) {
    const maxNbytes = Math.max(0, ...models.map((model) => model.gpu_nbytes ?? 0));
    if (!maxNbytes) return;
    const measured = new Promise((resolve) => this.engine.addEventListener("gpu_memory", resolve, { once: true }));
    this.engine.probeGpuMemory(maxNbytes);
    await measured;
  }
}

/** The dialog; calls `choose({name, source})`, which returns a promise of whether it is a model. */
export class ModelDialog {
  constructor(engine, choose) {
    this.engine = engine;
    this.current = null; // {name, source} of the loaded model
    this.ollama = []; // the models that the server listed last
    this.dialog = byId("models-dialog");
    this.choose = (model) => {
      this.dialog.close();
      return choose({ name: model.name, source: this.stored.preferCopy(model.source) });
    };
    const notify = (message, isProblem = false) => this.notify(message, isProblem);
    this.stored = new StoredModels(engine);
    this.gpuMemory = new GpuMemory(engine);
    this.copy = new ModelCopy(engine, this.stored, notify);
    this.files = new ModelFiles({
      load: (file) => this.choose(this.fromFile(file)),
      addMmproj: (file) => this.addMmproj(file),
      notify,
    });
    for (const part of [this.stored, this.copy]) part.addEventListener("change", () => this.render());
    if (isHosted) byId("ollama-title").textContent = t("On this page");
    byId("model-button").addEventListener("click", () => this.open());
    this.dialog.addEventListener("close", () => this.copy.moveTo(byId("storing")));
  }

  fromFile(file) {
    return fromFile(file, this.files.mmprojs.get(file));
  }

  /** Load the current model again, with this file as its mmproj. */
  addMmproj(file) {
    if (!this.current) {
      this.notify(t("{file} holds the encoders of a model: load the model first, or drop both files together.", { file: file.name }), true);
      return;
    }
    const { name, source } = this.current;
    if (source.kind === "file") this.files.mmprojs.set(source.file, file);
    this.choose({ name, source: { ...source, mmproj: { kind: "file", file } } });
  }

  /** Show a message in the dialog if it is open, else above the conversation. */
  notify(message, isProblem) {
    if (!this.dialog.open) {
      showNotice(message, isProblem ? { name: t("Show the models"), act: () => this.open() } : null);
      return;
    }
    byId("models-status").textContent = message;
    byId("models-status").classList.toggle("problem", isProblem);
  }

  async open() {
    if (!this.dialog.open) this.dialog.showModal();
    this.copy.moveTo(byId("storing-in-dialog"));
    byId("models-status").textContent = "";
    byId("ollama-state").textContent = this.ollama.length || isHosted ? "" : t("Reading Ollama’s models …");
    this.render();
    await this.refresh();
  }

  /** List all models, then measure which of them fit. */
  async refresh() {
    await Promise.all([this.refreshOllama(), this.stored.refresh()]);
    await this.gpuMemory.probe([...this.ollama, ...this.stored.models]);
    this.render();
  }

  async refreshOllama() {
    let [models, problems, state] = [[], [], NO_SERVER];
    try {
      const response = await fetch("api/models");
      if (response.ok) ({ models, problems } = await response.json());
      else problems = [await response.text()];
      state = models.length || problems.length || isHosted ? "" : NO_MODELS;
    } catch { /* the server is not running */ }
    this.ollama = models;
    byId("problems").replaceChildren(...problems.map((text) => element("li", "", text)));
    byId("ollama-state").textContent = state;
    if (isHosted) byId("ollama-title").hidden = !models.length && !state;
    this.render();
  }

  /** Return the model that a hosted page offers, or undefined. */
  async offered() {
    await this.refreshOllama();
    const model = this.ollama.find(({ problem }) => !problem);
    return model && { ...fromOllama(model), size: humanSize(model.nbytes) };
  }

  /** Return the models that were listed last and can be loaded: {name, source}, stored copies first. */
  all() {
    const stored = this.stored.models.filter((model) => model.complete && !this.isPart(model)).map(fromStored);
    const others = this.ollama.filter((model) => !model.problem && !this.stored.copyOf(fromOllama(model).source)?.complete).map(fromOllama);
    return [...stored, ...others, ...this.files.chosen.map((file) => this.fromFile(file))];
  }

  /** Return the names of the models that fit the GPU. */
  async fittingNames() {
    await this.refresh();
    const models = [...this.stored.models.filter((model) => model.complete), ...this.ollama.filter((model) => !model.problem)];
    const fitting = models.filter((model) => ![TOO_LARGE, ""].includes(fitOf(model, this.gpuMemory.nbytes)));
    return [...new Set([...fitting.map((model) => model.name), BUNDLED.name])];
  }

  /** Show the current lists; the focus stays on its control if that still exists. */
  render() {
    if (!this.dialog.open) return;
    const key = document.activeElement?.closest("[data-key]")?.dataset.key;
    byId("stored").replaceChildren(
      this.item(BUNDLED, { facts: [t("small, included in webgemma")] }),
      ...this.stored.models.filter((model) => !this.isPart(model)).map((model) => this.storedItem(model)),
    );
    const { freeNbytes } = this.stored;
    byId("stored-state").textContent = freeNbytes === null ? "" : t("{size} more can be stored here.", { size: humanSize(freeNbytes) });
    byId("ollama").replaceChildren(...this.ollama.map((model) => this.ollamaItem(model)));
    byId("files").replaceChildren(...this.files.chosen.map((file) => this.fileItem(file)));
    if (key && !this.dialog.contains(document.activeElement)) {
      const again = [...this.dialog.querySelectorAll("[data-key]")].find((other) => other.dataset.key === key);
      (again && !again.disabled ? again : byId("models-title")).focus();
    }
  }

  /** Whether a stored file is not a model, but belongs to one: its mmproj file, or its drafter. */
  isPart({ id, digest }) {
    const parts = this.ollama.flatMap(({ projectors = [], draft }) => [...projectors, ...(draft ? [draft] : [])]);
    return this.stored.models.some(({ mmproj, draft }) => mmproj === id || draft === id)
      || (digest !== null && parts.some((part) => part.digest === digest));
  }

  storedItem(stored) {
    const { id, name, nbytes, stored_nbytes, complete } = stored;
    const isCopying = this.copy.current?.id === id;
    const remove = namedButton(t("Delete"), t("Delete {name}", { name }), "quiet", () => this.remove(stored));
    const resume = namedButton(t("Resume"), t("Resume {name}", { name }), "", () => this.resume(stored));
    resume.disabled = this.copy.current !== null;
    const progress = isCopying ? t("being stored")
      : t("{done} of {total} stored", { done: humanSize(stored_nbytes), total: humanSize(nbytes) });
    return this.item(fromStored(stored), {
      size: humanSize(nbytes),
      facts: complete ? [] : [progress],
      fit: fitOf(stored, this.gpuMemory.nbytes),
      isDisabled: !complete,
      actions: isCopying ? [] : [...(complete ? [] : [resume]), remove],
    });
  }

  ollamaItem(model) {
    const { source } = fromOllama(model);
    return this.item(fromOllama(model), {
      size: model.problem ? "" : humanSize(model.nbytes),
      facts: [model.family, model.parameters, model.quantisation, this.stored.copyOf(source)?.complete && t("stored")],
      fit: fitOf(model, this.gpuMemory.nbytes),
      isDisabled: Boolean(model.problem),
      problem: model.problem,
      actions: model.problem ? [] : this.storeButton(source, model.name),
    });
  }

  fileItem(file) {
    const { source } = this.fromFile(file);
    return this.item(this.fromFile(file), {
      size: humanSize(file.size),
      facts: [
        t("chosen in this visit"), source.mmproj && t("with {file}", { file: source.mmproj.file.name }),
        this.stored.copyOf(source)?.complete && t("stored"),
      ],
      actions: this.storeButton(source, file.name),
    });
  }

  /** Return a Store button, unless a copy exists; a partial one has its Resume button in the stored list. */
  storeButton(source, name) {
    if (this.stored.copyOf(source)) return [];
    const store = namedButton(t("Store"), t("Store {name}", { name }), "quiet", () => this.store(source));
    store.title = t("Store it in this browser: it then loads faster, also offline");
    store.disabled = this.copy.current !== null;
    return [store];
  }

  item(model, { fit = "", isDisabled = false, problem = null, actions = [], ...facts }) {
    const isCurrent = this.current !== null && isSame(model.source, this.current.source);
    const choice = modelButton(model.name, { ...facts, isCurrent }, () => this.choose(model));
    choice.disabled = isDisabled;
    const line = choice.querySelector(".facts");
    if (fit) line.append(line.textContent ? " · " : "", element("span", fit === TOO_LARGE ? "problem" : "", fit));
    const item = element("li", "", choice, actions.length ? element("div", "acts", actions) : []);
    [choice, ...actions].forEach((control, at) => {
      control.dataset.key = `${model.source.kind} ${model.source.id ?? ""} ${model.name} ${at && control.textContent}`;
    });
    if (problem) item.append(element("p", "problem", problem));
    return item;
  }

  /** Resume a partial copy, from where its first bytes came from. */
  resume(stored) {
    const model = this.ollama.find(({ digest, problem }) => digest && digest === stored.digest && !problem);
    if (model) this.store(fromOllama(model).source);
    else if (isModelFile(stored)) this.files.request(stored.name, stored.nbytes, (file) => this.store(fromFile(file).source));
    else this.notify(t("The rest of {name} is in Ollama’s store, where it is not found: start `webgemma web`, or pull the model again.", { name: stored.name }), true);
  }

  store(source) {
    byId("models-status").textContent = "";
    this.copy.start(source);
  }

  async remove(stored) {
    const { id, name } = stored;
    const isLoaded = this.current !== null && isSame(fromStored(stored).source, this.current.source);
    const question = isLoaded ? t("Delete {name} from this browser? It is loaded: the bundled model will be loaded instead.", { name })
      : t("Delete {name} from this browser?", { name });
    if (!await confirmed(question, t("Delete"))) return;
    if (isLoaded) await this.choose(BUNDLED); // which closes the file
    this.engine.deleteStored(id);
  }
}

// The model of the last visit, in localStorage: {model, isLoaded}.

const LAST_MODEL_KEY = scoped("webgemma-model");

function writeLastModel(value) {
  try {
    localStorage.setItem(LAST_MODEL_KEY, JSON.stringify(value));
  } catch { /* the next visit starts with the bundled model */ }
}

/**
 * Return {model, wasLoading} of the last visit, or null; wasLoading: it was not loaded when the page was closed. The
 * source of a file is {kind: "file"} without the file, which only handles.js may have.
 */
export function lastModel() {
  try {
    const text = localStorage.getItem(LAST_MODEL_KEY)?.replaceAll('"/models/', '"models/'); // older entries
    const { model, isLoaded } = JSON.parse(text ?? null) ?? {};
    const isKnown = typeof model?.name === "string" && ["url", "stored", "file"].includes(model.source?.kind);
    if (!isKnown) return null;
    const { eyes, mmproj = eyes, ...source } = model.source; // entries in a browser may name it `eyes`
    return { model: { name: model.name, source: mmproj ? { ...source, mmproj } : source }, wasLoading: !isLoaded };
  } catch {
    return null;
  }
}

/** Remember a model that starts to load or is loaded; of a file, its name and, if there is one, its handle. A drafter has a URL. */
export function rememberModel({ name, source: { mmproj, file, ...source } }, isLoaded) {
  writeLastModel({ model: { name, source: mmproj?.kind === "url" ? { ...source, mmproj } : source }, isLoaded });
  if (isLoaded) keepHandles({ ...source, file, mmproj });
}
