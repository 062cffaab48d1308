// The documents that are searched: their texts and the vectors of their passages, in a database of this browser.
//
// A document is {id, name, title, nbytes, modified, pages?, text, cuts}: its path or name, the size and the date of its
// file, its text as document_text.js reads it, and where its passages begin and end in it. An embedder makes vectors
// (tab_embedder.js, server_embedder.js). It has
//   fingerprint                     what no other model has, or null: there is none, and passages are found by words
//   size                            numbers of a vector
//   embed(texts, task)              return a promise of the vectors of texts in one Float32Array; task: "query" or "document"
//   nearest(key, vectors, question, count)   return a promise of the numbers of those vectors that are most like a
//                                   question, the best first; `vectors()` returns all in one Float32Array, which stays
//                                   the same while `key` does
// and dispatches "change" when its fingerprint changes.

import { completed, resultOf } from "./database.js";
import { readDocument, shownName } from "./document_text.js";
import { randomId } from "./dom.js";
import { language, t } from "./language.js";
import { chosen, cut, placeOf, WordIndex } from "./passages.js";
import { scoped } from "./scope.js";

const NAME = scoped("webgemma-documents"); // names of the database, its stores and fields are in users' browsers: they stay
const VERSION = 1;
const DOCUMENTS = "documents"; // as above
const VECTORS = "vectors"; // {document, model: a fingerprint, data: ArrayBuffer}
const CHANNEL = scoped("webgemma.documents");

const MAX_CHARS = 50e6; // of all documents: they are in memory while they are searched
const BATCH = 16; // passages that are embedded at once
const TOP = 6; // passages that a question is given
const DEPTH = 4; // passages that are looked at, for each of them

const all = (store) => resultOf(store.getAll());

/** Return a passage as citations.js describes it. */
const passageOf = ({ document, begin, end }) => ({
  document: document.id,
  name: document.name,
  title: document.title,
  begin,
  end,
  ...placeOf(document, begin, end),
  unit: document.pages ? "page" : "line",
  text: document.text.slice(begin, end),
});

/**
 * The documents. Events: "change" (documents or vectors are others, or `progress` is). `progress` is null or {stage:
 * "reading" | "embedding", done, total, name}; `problem` is what the latest search or embedding failed with, or "".
 */
export class Library extends EventTarget {
  constructor(embedder) {
    super();
    this.embedder = embedder;
    this.byId = new Map();
    this.vectors = new Map(); // by the id of a document: Float32Array of the model's fingerprint
    this.begun = new Map(); // by the id of a document: what is embedded of it
    this.revision = 0; // of the documents and vectors
    this.progress = null;
    this.problem = "";
    this.isStopped = false;
    this.words = null; // {key, index, passages}
    this.database = null;
    this.queue = Promise.resolve(); // of additions: one after the other
    this.opened = this.open();
    embedder.addEventListener("change", () => this.onEmbedder());
  }

  async open() {
    try {
      const request = indexedDB.open(NAME, VERSION);
      request.onupgradeneeded = () => {
        request.result.createObjectStore(DOCUMENTS, { keyPath: "id" });
        request.result.createObjectStore(VECTORS, { keyPath: ["document", "model"] });
      };
      this.database = await resultOf(request);
      this.database.onversionchange = () => this.database.close();
      this.channel = new BroadcastChannel(CHANNEL);
      this.channel.onmessage = () => this.read().catch(() => {});
      await this.read();
    } catch (error) {
      this.database = null;
      this.problem = t("This browser does not store documents ({error}): they are kept until you close the page.", { error: error.message });
    }
    this.changed();
  }

  /** Read what is stored, which another tab may have changed. */
  async read() {
    const transaction = this.database.transaction([DOCUMENTS, VECTORS]);
    const { fingerprint } = this.embedder;
    const [documents, vectors] = await Promise.all([DOCUMENTS, VECTORS].map((name) => all(transaction.objectStore(name))));
    this.byId = new Map(documents.map((document) => [document.id, document]));
    const isOfModel = ({ document, model }) => model === fingerprint && this.byId.has(document);
    this.vectors = new Map(vectors.filter(isOfModel).map(({ document, data }) => [document, new Float32Array(data)]));
    this.changed();
  }

  changed() {
    this.revision += 1;
    this.dispatchEvent(new Event("change"));
  }

  report(progress) {
    this.progress = progress;
    this.dispatchEvent(new Event("change"));
  }

  /** All documents, by name. */
  list() {
    return [...this.byId.values()].sort((a, b) => a.name.localeCompare(b.name, language, { numeric: true }));
  }

  get(id) {
    return this.byId.get(id);
  }

  /** Whether a document's passages have vectors of the model. */
  isEmbedded = ({ id }) => this.vectors.has(id);

  /** Whether questions are answered by vectors: all documents have some. */
  get isByMeaning() {
    return this.embedder.fingerprint !== null && this.byId.size > 0 && this.list().every(this.isEmbedded);
  }

  /** Write to the database, and tell the other tabs. */
  async store(write) {
    if (!this.database) return;
    const transaction = this.database.transaction([DOCUMENTS, VECTORS], "readwrite");
    const done = completed(transaction);
    write(transaction.objectStore(DOCUMENTS), transaction.objectStore(VECTORS));
    await done;
    this.channel.postMessage(null);
  }

  // Adding and removing

  /**
   * Add files, or replace those of the same name; then embed what is new. Returns a promise of {added, unchanged,
   * problems, remarks}: names, and messages for the user.
   */
  add(files) {
    const result = this.queue.then(() => this.addAll(files));
    this.queue = result.then(() => this.embedAll()).catch(() => {});
    return result;
  }

  async addAll(files) {
    await this.opened;
    this.isStopped = false;
    const outcome = { added: [], unchanged: [], problems: [], remarks: [] };
    for (const [done, file] of files.entries()) {
      if (this.isStopped) break;
      const name = shownName(file.path || file.webkitRelativePath || file.name);
      this.report({ stage: "reading", done, total: files.length, name });
      try {
        const isNew = await this.addOne(file, name, (remark) => outcome.remarks.push(remark));
        outcome[isNew ? "added" : "unchanged"].push(name);
      } catch (error) {
        outcome.problems.push(error.message);
        if (error.isFull) break;
      }
    }
    this.report(null);
    return outcome;
  }

  /** Add a file, and return whether it is new or has changed. */
  async addOne(file, name, remark) {
    const existing = [...this.byId.values()].find((document) => document.name === name);
    if (existing && existing.nbytes === file.size && existing.modified === file.lastModified) return false;
    const { text, title, pages } = await readDocument(file, { remark, asPage: true });
    const facts = { name, title, nbytes: file.size, modified: file.lastModified, ...(pages && { pages }) };
    if (existing?.text === text) {
      await this.put({ ...existing, ...facts });
      return false;
    }
    const chars = [...this.byId.values()].reduce((sum, document) => sum + document.text.length, text.length - (existing?.text.length ?? 0));
    if (chars > MAX_CHARS) {
      throw Object.assign(new Error(t("{name} was not added: the documents together may have {count} characters. Delete some first.", { name, count: MAX_CHARS.toLocaleString(language) })), { isFull: true });
    }
    await this.put({ id: randomId(), ...facts, text, cuts: cut(text) }, existing);
    return true;
  }

  /** Store a document in place of another one; vectors of the same text are kept. */
  async put(document, replaced = null) {
    const same = this.vectors.has(document.id) ? null : [...this.byId.values()].find(({ id, text }) => this.vectors.has(id) && text === document.text);
    try {
      await this.store((documents, vectors) => {
        documents.put(document);
        if (replaced) this.erase(documents, vectors, replaced.id);
      });
    } catch (error) {
      const reason = error.name === "QuotaExceededError" ? t("The storage of this browser is full") : error.message;
      throw Object.assign(new Error(t("{name} was not added ({reason}). What was there before is unchanged: free disk space, or delete documents or stored models.", { name: document.name, reason })), { isFull: true });
    }
    this.byId.set(document.id, document);
    if (replaced) this.forget(replaced.id);
    if (same) await this.keepVectors(document, this.vectors.get(same.id));
    this.changed();
  }

  erase(documents, vectors, id) {
    documents.delete(id);
    vectors.delete(IDBKeyRange.bound([id], [id, []]));
  }

  forget(id) {
    for (const map of [this.byId, this.vectors, this.begun]) map.delete(id);
  }

  /** Delete documents. */
  async remove(ids) {
    await this.store((documents, vectors) => ids.forEach((id) => this.erase(documents, vectors, id)));
    ids.forEach((id) => this.forget(id));
    this.changed();
  }

  /** Stop reading and embedding; what is finished stays, and `resume` goes on. */
  stop() {
    this.isStopped = true;
  }

  // Vectors

  /** Another model: read its vectors, and embed what has none. */
  async onEmbedder() {
    await this.opened;
    this.vectors.clear();
    this.begun.clear();
    this.problem = "";
    if (this.database) await this.read().catch(() => {});
    this.changed();
    this.resume();
  }

  resume() {
    this.isStopped = false;
    this.queue = this.queue.then(() => this.embedAll()).catch(() => {});
    return this.queue;
  }

  /** Embed all passages that have no vectors. */
  async embedAll() {
    const { fingerprint } = this.embedder;
    const waiting = this.list().filter((document) => !this.isEmbedded(document));
    if (fingerprint === null || !waiting.length) return;
    const total = waiting.reduce((sum, { cuts }) => sum + cuts.length, 0);
    let done = 0;
    try {
      for (const document of waiting) {
        const before = done;
        const vectors = await this.embed(document, (count) => {
          done = before + count;
          this.report({ stage: "embedding", done, total, name: document.name });
        });
        if (!vectors || this.embedder.fingerprint !== fingerprint) break; // stopped, or another model
        if (this.byId.has(document.id)) await this.keepVectors(document, vectors);
      }
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
    }
    this.progress = null;
    this.changed();
  }

  /** Return the vectors of a document, or null if that was stopped; it goes on where it was. */
  async embed({ id, text, cuts }, report) {
    const { size } = this.embedder;
    if (!this.begun.has(id)) this.begun.set(id, { data: new Float32Array(cuts.length * size), count: 0 });
    const begun = this.begun.get(id);
    report(begun.count);
    while (begun.count < cuts.length) {
      if (this.isStopped) return null;
      const texts = cuts.slice(begun.count, begun.count + BATCH).map(([begin, end]) => text.slice(begin, end));
      const made = await this.embedder.embed(texts, "document");
      if (made.length !== texts.length * size || !made.every(Number.isFinite)) throw new Error(t("The embedding model made vectors of another size than it said, or of numbers that are not finite: choose another one."));
      begun.data.set(made, begun.count * size);
      begun.count += texts.length;
      report(begun.count);
    }
    this.begun.delete(id);
    return begun.data;
  }

  async keepVectors(document, data) {
    this.vectors.set(document.id, data);
    const model = this.embedder.fingerprint;
    try {
      await this.store((_, vectors) => {
        vectors.delete(IDBKeyRange.bound([document.id], [document.id, []])); // those of another model
        vectors.put({ document: document.id, model, data: data.slice().buffer });
      });
    } catch (error) {
      this.problem = t("The vectors of {name} are not stored ({error}): they last until you close the page.", { name: document.name, error: error.message });
    }
    this.changed();
  }

  // Search

  /** Return a promise of the passages that answer a question best, at most `count`: see citations.js. */
  async find(question, count = TOP) {
    await this.opened;
    if (this.isByMeaning) {
      try {
        return await this.byMeaning(question, count);
      } catch (error) {
        this.problem = error.message;
        this.dispatchEvent(new Event("change"));
      }
    }
    return this.byWords(question, count);
  }

  async byMeaning(question, count) {
    const documents = this.list();
    const passages = documents.flatMap((document) => document.cuts.map(([begin, end]) => ({ document, begin, end })));
    const vectors = () => {
      const whole = new Float32Array(passages.length * this.embedder.size);
      let at = 0;
      for (const { id } of documents) {
        whole.set(this.vectors.get(id), at);
        at += this.vectors.get(id).length;
      }
      return whole;
    };
    const key = `${this.embedder.fingerprint} ${this.revision}`;
    const found = await this.embedder.nearest(key, vectors, question, count * DEPTH);
    return chosen(found.map((number) => passages[number]), count).map(passageOf);
  }

  async byWords(question, count) {
    const key = this.list().map(({ id }) => id).join(" ");
    if (this.words?.key !== key) {
      const passages = this.list().flatMap((document) => document.cuts.map(([begin, end]) => ({ document, begin, end })));
      const index = new WordIndex();
      await index.add(passages.map(({ document, begin, end }) => document.text.slice(begin, end)));
      this.words = { key, index, passages };
    }
    const { index, passages } = this.words;
    return chosen(index.find(question, count * DEPTH).map((number) => passages[number]), count).map(passageOf);
  }
}
