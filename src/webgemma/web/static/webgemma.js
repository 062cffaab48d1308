// webgemma as a JavaScript module, for pages of others: a model in a worker of the page, which chats and embeds.
// It speaks with worker.js as the chat page does; tab_engine.js lists the messages. webgemma.d.ts explains what is
// public. All files lie beside this one; `load` may name another place for Pyodide alone.

const NO_START = "webgemma has not started: worker.js, package/, wheel/, lib/ and api/ have to lie beside webgemma.js, as they are in its package.";
/** What is wrong, by the kind of an error, where the engine's words are for other places. */
const SENTENCES = {
  "no-webgpu": "This browser offers no GPU: use a browser with WebGPU (a current Chrome, Edge or Safari, or Firefox on Windows or a Mac), switch hardware acceleration on, and open the page over https or from localhost.",
  "no-server": NO_START,
  "no-pyodide": NO_START,
  "no-schemas": "Replies by a schema, choices, pattern, grammar or tools need lib/xgrammar/ beside webgemma.js, which cannot be loaded.",
};
const OTHER_ORIGIN = "webgemma.js comes from another server than this page, and browsers do not start workers of another server: serve its folder from your own.";
const FAILED = "The engine has failed: load the model again.";
const CLOSED = "This model is closed: load it again.";
const DAMAGED = "An audio file is damaged, empty or not audio that this browser can play.";
const NO_MESSAGES = "Messages are a text, or a list of {role, content}, whose content is text or a list of parts with a type.";
const NO_TEXTS = "Texts to embed are a list.";
const NO_IMAGE = "An image in a message is a Blob or File, such as (await fetch(address)).blob() returns.";
const NO_AUDIO = "Audio in a message is a Blob or File, or a Float32Array of samples at 16 kHz.";
const NO_SOURCE = "A model is an address, a File or Blob, or nothing, which is the bundled one.";

/** An error with a sentence for people, and a kind for programs. */
export class WebgemmaError extends Error {
  constructor(message, kind = "other") {
    super(message);
    this.name = "WebgemmaError";
    this.kind = kind;
  }
}

/** Load a model in a worker of its own. */
export async function load(source, options = {}) {
  const { pyodide, progress, signal, mmproj, draft, context = null, precision = "auto" } = options;
  signal?.throwIfAborted();
  const request = { type: "load", source: { ...sourceOf(source) }, options: { context, precision } };
  if (mmproj) request.source.mmproj = sourceOf(mmproj);
  if (draft) request.source.draft = sourceOf(draft);
  const connection = new Connection(pyodide);
  try {
    const call = connection.begin(null, signal);
    connection.send(request);
    for (;;) {
      const message = await call.next();
      if (message.type === "progress") progress?.(message.loaded, message.total);
      if (message.type === "loaded") return new Model(connection, message);
    }
  } catch (error) {
    connection.close();
    throw error;
  } finally {
    connection.end(null);
  }
}

/** A loaded model, which `load` makes. */
class Model {
  #connection;

  constructor(connection, { name, context, device, nbytes }) {
    this.#connection = connection;
    Object.assign(this, { name, context, device, nbytes });
    Object.freeze(this);
  }

  /** Reply to a conversation, or to one text, piece by piece. */
  chat(messages, options = {}) {
    return new Reply(this.#pieces(messages, options));
  }

  async *#pieces(messages, { signal, progress, continue_last = false, ...settings }) {
    signal?.throwIfAborted();
    for (const [name, value] of Object.entries(settings)) {
      // JSON would turn it into null, the default.
      if (typeof value === "number" && !Number.isFinite(value)) throw new WebgemmaError(`${name} is ${value}, not a number.`);
    }
    const connection = this.#connection;
    const id = crypto.randomUUID();
    const call = connection.begin(id, signal);
    let text = "";
    try {
      connection.send({ type: "chat", id, messages: await readable(messages), settings, continue_last });
      for (;;) {
        const message = await call.next();
        if (message.type === "encoding") progress?.(message.done, message.total);
        if (message.type === "canvas") yield piece(message, { canvas: canvasOf(message) });
        if (message.type === "tool_call") {
          yield piece(message, { tool_calls: [{ name: message.name, arguments: message.arguments }] });
        }
        if (message.type === "piece") {
          if (!message.thinking) text += message.text;
          yield piece(message, { [message.thinking ? "thinking" : "text"]: message.text });
        }
        if (message.type === "done") {
          const { finish, tokens_per_second } = message;
          const value = settings.schema && finish === "stop" ? valueOf(text) : undefined;
          yield piece(message, { finish, tokens_per_second, value });
          return;
        }
      }
    } finally {
      connection.end(id);
    }
  }

  /** Return a vector of length 1 for each of the texts. */
  async embed(texts, { task = null, size = null, signal } = {}) {
    signal?.throwIfAborted();
    if (typeof texts === "string" || !texts?.[Symbol.iterator]) throw new WebgemmaError(NO_TEXTS);
    const listed = [...texts];
    if (!listed.length) return [];
    const connection = this.#connection;
    const id = crypto.randomUUID();
    const call = connection.begin(id, signal);
    try {
      connection.send({ type: "embed", id, texts: listed, task, size });
      const { vectors } = await call.next();
      const width = vectors.length / listed.length;
      return listed.map((_, at) => vectors.slice(at * width, (at + 1) * width));
    } finally {
      connection.end(id);
    }
  }

  /** End the worker, which frees all memory, on the GPU too; what is being written fails. */
  close() {
    this.#connection.close();
  }
}

/** A reply that is being written: pieces to iterate over once, or the whole text. */
class Reply {
  #pieces;

  constructor(pieces) {
    this.#pieces = pieces;
  }

  [Symbol.asyncIterator]() {
    return this.#pieces;
  }

  /** Return the text of the reply when it is complete, without the thoughts. */
  async text() {
    let text = "";
    for await (const part of this) text += part.text;
    return text;
  }
}

const canvasOf = ({ runs, number, step, accepted, size }) => ({ runs, number, step, accepted, size });

/** Return what a reply by a schema stands for; undefined if a stop string has cut it. */
function valueOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

const piece = ({ usage = null }, fields) => ({ text: "", thinking: "", tool_calls: [], finish: "", usage, ...fields });

/** The worker, and the calls that wait for its messages; one without an id is that of loading. */
class Connection {
  #calls = new Map();
  #failure = null; // the error of every later call
  #worker;

  constructor(pyodide) {
    const url = new URL("./worker.js", import.meta.url);
    if (url.origin !== globalThis.location?.origin) throw new WebgemmaError(OTHER_ORIGIN);
    if (pyodide) {
      const folder = absolute(pyodide).href;
      url.searchParams.set("pyodide", folder.endsWith("/") ? folder : `${folder}/`);
    }
    this.#worker = new Worker(url, { type: "module" });
    this.#worker.addEventListener("message", ({ data }) => this.#receive(data));
    const fail = (event) => {
      event.preventDefault();
      this.#fail(new WebgemmaError(this.#calls.has(null) ? NO_START : FAILED));
    };
    this.#worker.addEventListener("error", fail);
    this.#worker.addEventListener("messageerror", fail);
  }

  /** Return a new call, which the signal ends. */
  begin(id, signal) {
    if (this.#failure) throw this.#failure;
    const call = new Call();
    const abort = () => {
      call.abort(signal.reason);
      this.#stop(id, call);
    };
    signal?.addEventListener("abort", abort);
    call.release = () => signal?.removeEventListener("abort", abort);
    this.#calls.set(id, call);
    return call;
  }

  /** Send a request; those of a call that has ended are dropped. */
  send(message) {
    const call = this.#calls.get(message.id);
    if (this.#failure || call?.hasEnded) return;
    if (call) call.isComputed = true;
    this.#worker.postMessage(message);
  }

  /** End a call; nothing more is computed for it. */
  end(id) {
    const call = this.#calls.get(id);
    call.release();
    this.#stop(id, call);
    this.#calls.delete(id);
  }

  #stop(id, call) {
    if (call.isComputed && !this.#failure) this.#worker.postMessage({ type: "stop", id });
    call.isComputed = false;
  }

  close() {
    this.#fail(new WebgemmaError(CLOSED, "closed"));
  }

  #receive(message) {
    const { type, id = null } = message;
    const call = this.#calls.get(id);
    if (call && ["done", "embedded", "error"].includes(type)) call.isComputed = false;
    if (type !== "error") {
      call?.push(message);
      return;
    }
    const error = new WebgemmaError(SENTENCES[message.kind] ?? message.message, message.kind);
    if (id === null || error.kind === "device-lost") this.#fail(error);
    else call?.fail(error);
  }

  /** End the worker and all calls: nothing more can be computed. */
  #fail(error) {
    if (this.#failure) return;
    this.#failure = error;
    this.#worker.terminate();
    for (const call of this.#calls.values()) call.fail(error);
  }
}

/** The messages about one call, until it fails or is aborted. */
class Call {
  isComputed = false; // whether the worker computes it
  #messages = [];
  #error = null; // [the error]
  #wake = () => {};

  get hasEnded() {
    return this.#error !== null;
  }

  push(message) {
    this.#messages.push(message);
    this.#wake();
  }

  /** Fail after the messages that have come. */
  fail(error) {
    this.#error ??= [error];
    this.#wake();
  }

  /** Fail at once. */
  abort(reason) {
    this.#messages = [];
    this.fail(reason);
  }

  /** Return the next message, or throw the error. */
  async next() {
    while (!this.#messages.length && !this.#error) await new Promise((resolve) => { this.#wake = resolve; });
    if (!this.#messages.length) throw this.#error[0];
    return this.#messages.shift();
  }
}

function absolute(address) {
  try {
    return new URL(address, globalThis.document?.baseURI ?? location.href);
  } catch {
    throw new WebgemmaError(`${address} is not an address.`);
  }
}

/** Return a model's source as the worker reads it. */
function sourceOf(source) {
  if (source === undefined || source === null) return { kind: "bundled" };
  if (source instanceof Blob || source.kind === "file") return { kind: "file", file: source };
  if (typeof source !== "string" && !(source instanceof URL)) throw new WebgemmaError(NO_SOURCE);
  const url = absolute(source);
  return { kind: "url", url: url.href, name: nameOf(url) };
}

function nameOf({ pathname, host }) {
  const name = pathname.split("/").at(-1) || host;
  try {
    return decodeURIComponent(name);
  } catch {
    return name; // with a % that encodes nothing
  }
}

/** Return messages as the worker reads them: audio as samples, which workers cannot decode. */
async function readable(messages) {
  if (typeof messages === "string") return [{ role: "user", content: messages }];
  if (!Array.isArray(messages)) throw new WebgemmaError(NO_MESSAGES);
  return Promise.all(messages.map(async (message) => {
    const content = message?.content ?? "";
    const isMessage = typeof message?.role === "string" && (typeof content === "string" || Array.isArray(content));
    if (!isMessage) throw new WebgemmaError(NO_MESSAGES);
    return { ...message, content: Array.isArray(content) ? await Promise.all(content.map(readablePart)) : content };
  }));
}

async function readablePart(part) {
  if (typeof part?.type !== "string") throw new WebgemmaError(NO_MESSAGES);
  if (part.type === "image" && !(part.image instanceof Blob)) throw new WebgemmaError(NO_IMAGE);
  if (part.type !== "audio" || part.audio instanceof Float32Array) return part;
  if (!(part.audio instanceof Blob)) throw new WebgemmaError(NO_AUDIO);
  return { ...part, audio: await samplesOf(part.audio) };
}

async function samplesOf(blob) {
  await import("./package/media/browser.js"); // defines the decoder
  try {
    const { samples } = await globalThis.webgemmaMedia.decodeAudio(blob);
    if (samples.length) return samples;
  } catch { /* said below */ }
  throw new WebgemmaError(DAMAGED, "file");
}
