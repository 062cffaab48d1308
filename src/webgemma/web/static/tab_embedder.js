// The embedder in this tab (see library.js): EmbeddingGemma in the worker of the chat model, beside it. It is loaded when
// it is first needed, and its vectors are searched on the GPU.

import { element, button, byId, randomId } from "./dom.js";
import { EmbedderChoice, isEmbeddingName } from "./embedder_choice.js";
import { t } from "./language.js";
import { errorMessage } from "./notice.js";
import { isHosted, scoped } from "./scope.js";

const KEY = scoped("webgemma.embedder"); // in localStorage: {model: {name, source}, size}

/** Return what no other file has. */
const fingerprintOf = ({ kind, digest, id, file, name }) => digest ?? (kind === "stored" ? id : `${file?.name ?? name} ${file?.size}`);

/** Return the model of the last visit, {model, size}, or null; a file has to be chosen again. */
function remembered() {
  try {
    const { model, size } = JSON.parse(localStorage.getItem(KEY)) ?? {};
    const isKnown = typeof model?.name === "string" && ["url", "stored"].includes(model.source?.kind);
    return isKnown && Number.isSafeInteger(size) && size > 0 ? { model, size } : null;
  } catch {
    return null;
  }
}

function remember(model, size) {
  try {
    if (model && model.source.kind !== "file") localStorage.setItem(KEY, JSON.stringify({ model, size }));
    else localStorage.removeItem(KEY);
  } catch { /* the next visit searches by words */ }
}

/** `models` is the dialog of the models: it lists those that may be chosen. */
export class TabEmbedder extends EventTarget {
  constructor(engine, models) {
    super();
    this.engine = engine;
    this.models = models;
    this.waiting = new Map(); // {resolve, reject} by the id of a request
    this.loading = null; // a promise while the model is loaded, and afterwards
    this.isLoading = false;
    this.uploaded = null; // the key of the vectors that the worker has
    this.problem = "";
    const { model = null, size = 0 } = remembered() ?? {};
    Object.assign(this, { model, size, fingerprint: model && fingerprintOf(model.source) });
    this.choice = new EmbedderChoice({ choose: (each) => this.choose(each), drop: () => this.drop() });
    this.element = this.choice.element;
    this.file = Object.assign(element("input"), { type: "file", accept: ".gguf", hidden: true, ariaLabel: t("Embedding model") });
    this.file.id = "embedder-file";
    this.file.addEventListener("change", () => {
      const [file] = this.file.files;
      if (file) this.choose({ name: file.name, source: { kind: "file", file } });
      this.file.value = "";
    });
    this.element.append(this.file);
    engine.addEventListener("searched", ({ detail }) => this.receive(detail));
    engine.addEventListener("started", () => this.lose(t("The model was loaded again: embedding goes on when you ask for it.")));
    engine.addEventListener("error", ({ detail }) => engine.hasFailed && this.lose(detail.message));
    models.stored.addEventListener("change", () => this.show());
    this.show();
  }

  receive({ search, type, message, kind, ...facts }) {
    const request = this.waiting.get(search);
    this.waiting.delete(search);
    if (kind === "device-lost") { // the worker has freed the model
      this.loading = null;
      this.uploaded = null;
    }
    if (type === "error") request?.reject(new Error(errorMessage({ message, kind })));
    else request?.resolve(facts);
  }

  /** The worker has ended, and the model with it. */
  lose(message) {
    this.loading = null;
    this.uploaded = null;
    for (const { reject } of this.waiting.values()) reject(new Error(message));
    this.waiting.clear();
  }

  request(request, fields = {}) {
    const id = randomId();
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.engine.search(id, request, fields);
    });
  }

  /** Load the model unless it is loaded; return a promise of the size of its vectors. */
  load() {
    this.loading ??= this.startLoad(this.model).catch((error) => {
      this.loading = null;
      throw error;
    });
    return this.loading;
  }

  async startLoad(model) {
    this.isLoading = true;
    this.show();
    try {
      const { size } = await this.request("load", { source: model.source });
      this.uploaded = null;
      return size;
    } finally {
      this.isLoading = false;
      this.show();
    }
  }

  /** Use a model: load it, so that a wrong file is refused at once; another one stays in use then. */
  async choose(model) {
    const before = this.model;
    this.model = model;
    this.loading = null;
    this.problem = "";
    try {
      this.size = await this.load();
    } catch (error) {
      this.model = before;
      this.problem = error.message;
      this.show();
      return;
    }
    remember(model, this.size);
    this.setFingerprint(fingerprintOf(model.source));
  }

  /** Use none, and free its memory. */
  drop() {
    this.model = null;
    remember(null);
    if (this.loading) this.request("free").catch(() => {});
    this.loading = null;
    this.uploaded = null;
    this.setFingerprint(null);
  }

  setFingerprint(fingerprint) {
    this.fingerprint = fingerprint;
    this.show();
    this.dispatchEvent(new Event("change"));
  }

  async embed(texts, task) {
    await this.load();
    const { vectors } = await this.request("embed", { texts, task });
    return new Float32Array(Uint8Array.from(atob(vectors), (letter) => letter.charCodeAt(0)).buffer);
  }

  async nearest(key, vectors, question, count) {
    await this.load();
    if (this.uploaded !== key) {
      const values = vectors();
      this.uploaded = null;
      await this.request("vectors", { vectors: values, size: this.size });
      this.uploaded = key;
    }
    const { numbers } = await this.request("nearest", { question, count });
    return numbers;
  }

  // In the dialog

  /** List the models again that may be chosen. */
  async refresh() {
    this.show();
    await Promise.all([this.models.refreshOllama(), this.models.stored.refresh()]);
    this.show();
  }

  show() {
    this.choice.show({
      name: this.model?.name ?? null,
      isLoading: this.isLoading,
      problem: this.problem,
      models: this.models.all().filter(({ name }) => isEmbeddingName(name)),
      help: isHosted ? t("To find them by their meaning, choose the file of EmbeddingGemma (.gguf).")
        : t("To find them by their meaning, add EmbeddingGemma (ollama pull embeddinggemma), or choose its file (.gguf)."),
      extra: [button(t("Choose a file …"), "quiet", () => byId("embedder-file").click())],
    });
  }
}
