// The embedder on the server that this page comes from (see library.js): its route /v1/embeddings.

import { EmbedderChoice, isEmbeddingName } from "./embedder_choice.js";
import { t } from "./language.js";
import { problemOf, request } from "./server_access.js";

const URL = "../v1/embeddings";
const KEY = "webgemma.server-embedder"; // in localStorage: {name, size}
const SIZE = 256; // of EmbeddingGemma's 768 numbers: a third of the storage, and nearly as good

function remembered() {
  try {
    const { name, size } = JSON.parse(localStorage.getItem(KEY)) ?? {};
    return typeof name === "string" && Number.isSafeInteger(size) && size > 0 ? { name, size } : null;
  } catch {
    return null;
  }
}

function remember(value) {
  try {
    if (value) localStorage.setItem(KEY, JSON.stringify(value));
    else localStorage.removeItem(KEY);
  } catch { /* the next visit searches by words */ }
}

/** `models` is set to those that the server lists. */
export class ServerEmbedder extends EventTarget {
  constructor() {
    super();
    this.models = [];
    this.problem = "";
    this.isLoading = false;
    const { name = null, size = 0 } = remembered() ?? {};
    Object.assign(this, { name, size, fingerprint: name && `${name} ${size}` });
    this.searched = { key: null, values: null };
    this.choice = new EmbedderChoice({ choose: ({ name: chosen }) => this.choose(chosen), drop: () => this.use(null, 0) });
    this.element = this.choice.element;
    this.show();
  }

  /** Use a model if it embeds; vectors are cut to SIZE numbers if they have as many. */
  async choose(name) {
    this.isLoading = true;
    this.problem = "";
    this.show();
    try {
      const whole = await this.post(name, ["text"], "document", null);
      this.use(name, Math.min(SIZE, whole.length));
    } catch (error) {
      this.problem = error.message;
    }
    this.isLoading = false;
    this.show();
  }

  use(name, size) {
    Object.assign(this, { name, size, fingerprint: name && `${name} ${size}` });
    remember(name && { name, size });
    this.show();
    this.dispatchEvent(new Event("change"));
  }

  /** Return the vectors of texts; throw an Error with a message for the user. */
  async post(model, texts, task, size) {
    const body = JSON.stringify({ model, input: texts, task, encoding_format: "base64", ...(size && { dimensions: size }) });
    const response = await request(URL, { method: "POST", body, headers: { "Content-Type": "application/json" } });
    if (!response.ok) throw new Error(await problemOf(response));
    const { data } = await response.json();
    const rows = data.map(({ embedding }) => Uint8Array.from(atob(embedding), (letter) => letter.charCodeAt(0)));
    return new Float32Array(await new Blob(rows).arrayBuffer());
  }

  embed(texts, task) {
    return this.post(this.name, texts, task, this.size);
  }

  async nearest(key, vectors, question, count) {
    const query = await this.embed([question], "query");
    if (this.searched.key !== key) this.searched = { key, values: vectors() };
    const { values } = this.searched;
    const { size } = this;
    const scores = new Float32Array(values.length / size);
    for (let row = 0; row < scores.length; row += 1) {
      let sum = 0;
      for (let i = 0, at = row * size; i < size; i += 1) sum += values[at + i] * query[i];
      scores[row] = sum;
    }
    return [...scores.keys()].sort((a, b) => scores[b] - scores[a] || a - b).slice(0, count);
  }

  refresh() {
    this.show();
  }

  show() {
    this.choice.show({
      name: this.name,
      isLoading: this.isLoading,
      problem: this.problem,
      models: this.models.filter(({ name }) => isEmbeddingName(name)),
      help: t("To find them by their meaning, the server needs an embedding model, such as EmbeddingGemma."),
    });
  }
}
