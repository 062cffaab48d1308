// The worker that holds the model, as the page sees it: what it is asked, and what it tells.
//
// The page asks:
//   load    source: {kind: "bundled"} | {kind: "url", url, name, digest, nbytes} | {kind: "file", file}
//             | {kind: "stored", id, name}, each with eyes?: such a source (what it sees and hears with),
//           options: {context, precision}                     (context null: the model's own)
//   chat    id, messages: [{role, content}], settings         (a setting that is null: the model's own)
//           content: text | [{type: "image", image: Blob} | {type: "audio", audio: Float32Array of 16 kHz}
//             | {type: "text", text}]
//   stop    id                                                (answered by the done of that id)
//   unload
//   keep    source: {kind: "url", …} | {kind: "file", file}   copy it into this browser's storage, or
//                                                             go on where an earlier copy was cut
//   leave   id                                                stop copying; what has come stays
//   forget  id                                                delete what is stored under this id
//   stored                                                    ask what is stored
//   room    nbytes                                            ask how much of so many bytes the GPU can give
//   examine  data, options                                   look through examples, see whether they fit
//            data: the text of their file; options: {name, rank, parts: "all" | "attention" | "feed-forward",
//            rate, epochs, steps, batch, max_length, held_out}  (steps: in place of epochs, or null; held_out: a share)
//   tune     data, options                                   train an adapter; what is on is taken off
//   enough                                                   stop training; what was learnt is kept
//   put_on   id                                              have this adapter on
//   take_off                                                 have none on
//   adapters                                                 ask what adapters there are
//   adapter  id                                              ask for an adapter's file
//   forget_adapter  id
// The worker tells:
//   ready     device, software        once it has found what it computes on; software: a slow one
//   progress  loaded, total           bytes
//   loaded    name, context, device, nbytes
//   sensing   id, senses: ["image"?, "audio"?], done, total   while it looks and listens, before the first piece
//   canvas    id, runs: [[text, settled]], block, step, settled, size  a block of DiffusionGemma that comes into focus
//   piece     id, text, thinking      thinking: whether the text belongs to the thoughts
//   done      id, finish: "stop" | "length" | "stopped", tokens, tokens_per_second
//   keeping   id, name, stage: "copying" | "checking", done, total         bytes; repeatedly
//   kept      id, name                the copy is whole and checked
//   left      id, name                copying was stopped
//   stored    models: [{id, name, nbytes, have, whole, digest, eyes?, gpu_nbytes, gpu_least_nbytes}], free_nbytes
//             when asked and after every change; have < nbytes: a copy that was cut and can go on;
//             eyes: the id of the stored file that it sees and hears with;
//             gpu_*: what it takes of the GPU, at the least with a table left in the file (null: unknown);
//             free_nbytes: what may still be stored (null: unknown)
//   room      nbytes                  what the GPU gave of it, with what the loaded model holds
//   examined  rows, examples, tokens, targets, truncated, skipped: [[line, why]], skipped_count, batch, steps,
//             nbytes, free_nbytes     skipped: the first of them; targets: tokens to be foreseen;
//             nbytes: what training takes of the GPU beside the model; free_nbytes: what of it the GPU gave
//   tuning    step, steps, rate, loss, judged, tokens_per_second   after each step; judged: the loss of what was
//             held out (null: not measured)
//   tuned     id, name, steps, loss, judged?, stopped          id null: nothing was learnt
//   adapted   id, name                what is on now (null: none)
//   adapters  adapters: [{id, name, nbytes, base, steps, loss, judged?, kept}]
//             when asked and after every change; kept: whether it is stored or goes with the page
//   adapter   id, blob                a GGUF file
//   error     id?, keep?, tune?, sentence,
//             kind: "no-webgpu" | "device-lost" | "memory" | "storage" | "file" | "senses" | "other"
//             with an id the reply has failed and the model stays, unless the device was lost;
//             with keep (the id of a copy) copying has failed and the model stays;
//             with tune (what was asked) fine-tuning has failed and the model stays, likewise;
//             without any of them there is no model now

export const WORKER_URL = "/worker.js";

const NO_START = "The engine of this page did not start. Reload the page; if that does not help, start "
  + "`webgemma web` again.";
const NO_MORE = "The engine of this page has failed. Your conversation is kept.";

/** What the worker may tell, by type; anything else is ignored. */
const TOLD = [
  "ready", "progress", "loaded", "sensing", "canvas", "piece", "done", "error", "keeping", "kept", "left", "stored", "room",
  "examined", "tuning", "tuned", "adapted", "adapters", "adapter",
];

/**
 * Sends requests to the worker and dispatches its messages as events of the same names.
 * `state` is "empty", "loading" or "loaded".
 */
export class Engine extends EventTarget {
  constructor() {
    super();
    this.state = "empty";
    this.copying = null; // the source that is being kept
    this.isLearning = false;
    this.start();
  }

  start() {
    const worker = new Worker(WORKER_URL, { type: "module" });
    this.worker = worker;
    this.isReady = false;
    worker.addEventListener("message", ({ data }) => this.hear(worker, data));
    const fail = (event) => {
      event.preventDefault();
      if (event.message) console.warn(event.message);
      this.hear(worker, { type: "error", kind: "other", sentence: this.isReady ? NO_MORE : NO_START });
    };
    worker.addEventListener("error", fail);
    worker.addEventListener("messageerror", fail);
  }

  hear(worker, message) {
    if (worker !== this.worker || !TOLD.includes(message?.type)) return; // of one given up: too late
    if (message.type === "ready") this.isReady = true;
    if (message.type === "loaded") this.state = "loaded";
    const isOfCopy = message.type === "error" && message.keep !== undefined;
    if (isOfCopy || message.type === "kept" || message.type === "left") this.copying = null;
    const isOfPart = message.id !== undefined || message.tune !== undefined;
    if (message.type === "error" && !isOfCopy && (!isOfPart || message.kind === "device-lost")) {
      this.state = "empty";
    }
    if (message.type === "tuned" || message.tune === "tune" || this.state === "empty") this.isLearning = false;
    this.dispatchEvent(new CustomEvent(message.type, { detail: message }));
  }

  /** End everything at once: the worker goes, a new one comes and has no model; a copy goes on. */
  restart() {
    this.worker.terminate();
    this.state = "empty";
    this.isLearning = false;
    this.start();
    if (this.copying) this.keep(this.copying);
  }

  /** Load a model in place of the one that is there; one that is still loading is given up. */
  load(source, options) {
    if (this.state === "loading") this.restart();
    if (this.isLearning) this.enough();
    if (this.state === "loaded") this.worker.postMessage({ type: "unload" });
    this.state = "loading";
    this.worker.postMessage({ type: "load", source, options });
  }

  chat(id, messages, settings) {
    this.worker.postMessage({ type: "chat", id, messages, settings });
  }

  stop(id) {
    this.worker.postMessage({ type: "stop", id });
  }

  keep(source) {
    this.copying = source;
    this.worker.postMessage({ type: "keep", source });
  }

  leave(id) {
    this.worker.postMessage({ type: "leave", id });
  }

  forget(id) {
    this.worker.postMessage({ type: "forget", id });
  }

  askStored() {
    this.worker.postMessage({ type: "stored" });
  }

  askRoom(nbytes) {
    this.worker.postMessage({ type: "room", nbytes });
  }

  examine(data, options) {
    this.worker.postMessage({ type: "examine", data, options });
  }

  tune(data, options) {
    this.isLearning = true;
    this.worker.postMessage({ type: "tune", data, options });
  }

  enough() {
    this.worker.postMessage({ type: "enough" });
  }

  /** Have an adapter on, or (null) none. */
  adapt(id) {
    this.worker.postMessage(id === null ? { type: "take_off" } : { type: "put_on", id });
  }

  askAdapters() {
    this.worker.postMessage({ type: "adapters" });
  }

  askAdapter(id) {
    this.worker.postMessage({ type: "adapter", id });
  }

  forgetAdapter(id) {
    this.worker.postMessage({ type: "forget_adapter", id });
  }
}
