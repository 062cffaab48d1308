// The engine in this tab: the page's side of the worker that runs the model, and the messages between them. Those of
// replies are the events that chat.js describes. webgemma.js, the module for pages of others, sends and reads the same.
//
// Requests of the page:
//   inspect id, source                                        read a file's header: is it a model? nothing is freed
//   load    source: {kind: "bundled"} | {kind: "url", url, name, digest, nbytes} | {kind: "file", file}
//             | {kind: "stored", id, name}, each with mmproj?, draft?: such sources (the file of the model's encoders,
//             and of its drafter),
//           options: {context, precision},                    (context null: the model's default)
//           inspected?: the id of an inspection of the source
//   chat    id, messages, settings, continue_last             content: text | [{type: "image", image: Blob}
//             | {type: "audio", audio: Float32Array at 16 kHz} | {type: "text", text}]
//                                                             (several at once are computed side by side)
//   embed   id, texts, task, size                             of an embedding model; task, size: null leaves them out
//   stop    id                                                a chat or an embed
//   store   source: {kind: "url", …} | {kind: "file", file}   copy it into this browser's storage, or resume an
//                                                             earlier copy
//   cancel_store  id                                          stop copying; what has been copied stays
//   delete  id                                                delete a stored model
//   list_stored
//   probe_gpu_memory  nbytes                                  measure how many of these bytes the GPU can hold
//   examine  data, options                                    check examples, and whether training on them fits
//            data: the text of their file; options: {name, rank, targets: "all" | "attention" | "feed-forward",
//            learning_rate, epochs, steps, batch, max_length, held_out}  (steps: instead of epochs, or null; held_out: a share)
//   tune     data, options                                    train an adapter; the applied one is detached
//   stop_tuning                                               stop training; the adapter so far is stored
//   apply_adapter  id                                         apply this adapter
//   detach_adapter                                            apply none
//   list_adapters
//   add_adapter  source                                       store the adapter in a file
//   read_adapter  id                                          request an adapter's file
//   delete_adapter  id
//   search  id, request, …                                    of documents: see tab_embedder.js
//           "load" source · "embed" texts, task · "vectors" vectors, size · "nearest" question, count · "free"
// Messages of the worker:
//   ready     device, software, matrix_units   the GPU was found; software: it is emulated and slow
//   progress  loaded, total           bytes of the model that is loading
//   inspected id, kind: "model" | "adapter" | "mmproj"
//   loaded    name, context, device, nbytes, images, audio, thinking   context: as requested, or the model's if that is
//             less; images, audio: whether it reads them; thinking: whether it may think
//   encoding, canvas, piece, tool_call, done   of a reply
//   embedded  id, vectors             a Float32Array: one vector after the other, all of one length
//   storing   id, name, stage: "copying" | "checking", done, total         bytes; repeatedly
//   stored    id, name                the copy is complete and checked
//   store_cancelled  id, name
//   stored_models  models: [{id, name, nbytes, stored_nbytes, complete, digest, mmproj, draft, gpu_nbytes,
//             gpu_min_nbytes}],
//             free_nbytes             on request and after every change; mmproj, draft: the ids of the stored files of
//             the encoders and of the drafter (null: none); gpu_nbytes: GPU memory of the model, gpu_min_nbytes: with a table left in the
//             file (null: unknown); free_nbytes: what may still be stored (null: unknown)
//   gpu_memory  nbytes                how many of the bytes the GPU can hold, including those of the loaded model
//             (null: no GPU)
//   examined  rows, examples, tokens, targets, truncated, skipped: [[line, reason]], skipped_count, batch, steps,
//             nbytes, free_nbytes     skipped: the first of them; targets: tokens to predict; nbytes: GPU memory of
//             training in addition to the model; free_nbytes: what of it the GPU can allocate
//   tuning    step, steps, learning_rate, loss, held_out_loss, tokens_per_second   after each step; held_out_loss: the loss of
//             the held-out rows (null: not measured)
//   tuned     id, name, steps, loss, held_out_loss?, stopped  id null: no step was completed
//   adapter_applied  id, name         the applied adapter (null: none)
//   adapters  adapters: [{id, name, nbytes, base, steps, loss, held_out_loss?, stored}]
//             on request and after every change; stored: false if it is lost when the page is closed
//   adapter_added  id, name           from a file
//   adapter_file  id, blob            a GGUF file
//   searched  search: the id of a search request, and what it has led to: size, nbytes | vectors: base64 | count | numbers
//   error     id?, inspect?, store?, tune?, search?, message,
//             kind: "no-webgpu" | "device-lost" | "device" | "memory" | "storage" | "file" | "no-encoder" | "prompt"
//             | "no-model" | "no-schemas" | "no-server" | "no-pyodide" | "other"; message: what is wrong, to which notice.js
//             adds what to do, or which it replaces
//             with an id a reply or an embed has failed, with inspect (its id) an inspection, with store (the id of a copy, or null) storing has failed, with tune
//             (the name of the request) fine-tuning has failed, and the model stays loaded unless the device was
//             lost; with none of them no model is loaded

import { samplesOf } from "./attachments.js";
import { randomId } from "./dom.js";
import { t } from "./language.js";
import { isHosted } from "./scope.js";

const WORKER_URL = new URL("worker.js", import.meta.url);

const NO_SERVER = isHosted
  ? t("The engine of this page did not start, because its server does not respond. Check the connection, then reload the page.")
  : t("The engine of this page did not start, because `webgemma web` does not respond. Start it again, then reload the page.");
const NO_START = t("The engine of this page did not start. Reload the page; if that does not help, free memory or disk space on this device.");
const FAILED = t("The engine of this page has failed. Your conversation is saved.");

/** Return why the worker did not start; the server is to blame only if it does not respond. */
const startProblem = () => fetch("api/about", { cache: "no-store" }).then(
  async (response) => (response.status === 403 ? response.text() : NO_START),
  () => NO_SERVER,
);

/** The message types of the worker; others are ignored. */
const MESSAGE_TYPES = [
  "ready", "inspected", "progress", "loaded", "encoding", "canvas", "piece", "tool_call", "done", "error", "storing",
  "stored", "store_cancelled", "stored_models", "gpu_memory", "examined", "tuning", "tuned", "adapter_applied", "adapters",
  "adapter_added", "adapter_file", "searched",
];

/**
 * Sends requests to the worker and dispatches its messages as events of the same names.
 * `state` is "empty", "loading" or "loaded".
 */
export class TabEngine extends EventTarget {
  constructor() {
    super();
    this.state = "empty";
    this.storing = null; // the source that is being stored
    this.isTuning = false;
    this.inspections = new Map(); // {resolve, reject} by id
    this.start();
  }

  start() {
    const worker = new Worker(WORKER_URL, { type: "module" });
    this.worker = worker;
    this.isReady = false;
    this.hasFailed = false; // the worker may not respond any more
    worker.addEventListener("message", ({ data }) => this.receive(worker, data));
    const fail = async (event) => {
      event.preventDefault();
      if (event.message) console.warn(event.message);
      const message = this.isReady ? FAILED : await startProblem();
      if (worker === this.worker) this.hasFailed = true;
      this.receive(worker, { type: "error", kind: "other", message });
    };
    worker.addEventListener("error", fail);
    worker.addEventListener("messageerror", fail);
    this.dispatchEvent(new Event("started"));
  }

  /** Update the state and dispatch a message. */
  receive(worker, detail) {
    if (worker !== this.worker || !MESSAGE_TYPES.includes(detail?.type)) return; // late, from a terminated worker
    const { type } = detail;
    if (type === "ready") this.isReady = true;
    if (type === "loaded") this.state = "loaded";
    if (type === "inspected" || detail.inspect !== undefined) {
      this.endInspection(detail);
      return;
    }
    if (detail.search !== undefined) {
      this.dispatchEvent(new CustomEvent("searched", { detail }));
      return;
    }
    const isStoreError = type === "error" && detail.store !== undefined;
    if (isStoreError || type === "stored" || type === "store_cancelled") this.storing = null;
    const hasRequest = detail.id !== undefined || detail.tune !== undefined;
    if (type === "error" && !isStoreError && (!hasRequest || detail.kind === "device-lost")) {
      this.state = "empty";
      if (!this.isReady) this.hasFailed = true;
      this.cancelInspections();
    }
    if (type === "tuned" || detail.tune === "tune" || this.state === "empty") this.isTuning = false;
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }

  /** Replace the worker by one without a model, which ends everything at once; a copy is resumed. */
  restart() {
    this.worker.terminate();
    this.cancelInspections();
    this.state = "empty";
    this.isTuning = false;
    this.start();
    if (this.storing) this.store(this.storing);
  }

  /**
   * Read the header of a source, and return {id, kind}; the loaded model stays. Rejects with the detail of the error,
   * or with null if the worker has ended.
   */
  inspect(source) {
    if (this.hasFailed) this.restart();
    const id = randomId();
    this.worker.postMessage({ type: "inspect", id, source });
    return new Promise((resolve, reject) => this.inspections.set(id, { resolve, reject }));
  }

  endInspection(detail) {
    const inspection = this.inspections.get(detail.inspect ?? detail.id);
    this.inspections.delete(detail.inspect ?? detail.id);
    if (detail.type === "error") inspection?.reject(detail);
    else inspection?.resolve(detail);
  }

  cancelInspections() {
    for (const { reject } of this.inspections.values()) reject(null);
    this.inspections.clear();
  }

  /** Load a model in place of the current one; one that is still loading is cancelled. */
  load(source, options, inspected = null) {
    if (this.state === "loading" || this.hasFailed) this.restart();
    if (this.isTuning) this.stopTuning();
    this.state = "loading";
    this.worker.postMessage({ type: "load", source, options, inspected });
  }

  async mediaPart(attachment) {
    if (attachment.kind === "image") return { type: "image", image: attachment.blob };
    return { type: "audio", audio: await samplesOf(attachment) };
  }

  chat(id, messages, settings, continue_last = false) {
    this.worker.postMessage({ type: "chat", id, messages, settings, continue_last });
  }

  stop(id) {
    this.worker.postMessage({ type: "stop", id });
  }

  store(source) {
    this.storing = source;
    this.worker.postMessage({ type: "store", source });
  }

  cancelStore(id) {
    this.worker.postMessage({ type: "cancel_store", id });
  }

  deleteStored(id) {
    this.worker.postMessage({ type: "delete", id });
  }

  listStored() {
    this.worker.postMessage({ type: "list_stored" });
  }

  probeGpuMemory(nbytes) {
    this.worker.postMessage({ type: "probe_gpu_memory", nbytes });
  }

  examine(data, options) {
    this.worker.postMessage({ type: "examine", data, options });
  }

  tune(data, options) {
    this.isTuning = true;
    this.worker.postMessage({ type: "tune", data, options });
  }

  stopTuning() {
    this.worker.postMessage({ type: "stop_tuning" });
  }

  /** Apply an adapter, or none if `id` is null. */
  applyAdapter(id) {
    this.worker.postMessage(id === null ? { type: "detach_adapter" } : { type: "apply_adapter", id });
  }

  listAdapters() {
    this.worker.postMessage({ type: "list_adapters" });
  }

  addAdapter(source) {
    this.worker.postMessage({ type: "add_adapter", source });
  }

  readAdapter(id) {
    this.worker.postMessage({ type: "read_adapter", id });
  }

  deleteAdapter(id) {
    this.worker.postMessage({ type: "delete_adapter", id });
  }

  search(id, request, fields) {
    this.worker.postMessage({ type: "search", id, request, ...fields });
  }
}
