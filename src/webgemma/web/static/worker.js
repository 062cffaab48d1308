// The page's worker: Python with webgemma's wheel, which computes on this browser's GPU. tab_engine.js lists
// the requests that it handles and the messages that it sends.
import "./package/device/replay.js"; // defines the GPU functions that Python uses,
import "./package/gguf/files.js"; // those for files,
import "./package/media/browser.js"; // for images and audio,
import "./package/constraints/xgrammar.js"; // and for replies that keep to a schema
import { startPython } from "./python.js";

const failure = (kind, message = kind) => Object.assign(new Error(message), { kind });

const post = (json) => self.postMessage(JSON.parse(json));

const gpuFound = (async () => { // reported at once if there is none: Python would take seconds to find out
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  if (!adapter) throw failure("no-webgpu");
})();

const pythonStarted = (async () => {
  if (!navigator.gpu) return null;
  const response = await fetch("api/about").catch(() => { throw failure("no-server"); });
  if (!response.ok) throw new Error(await response.text());
  const about = await response.json();
  const chosen = new URL(import.meta.url).searchParams.get("pyodide"); // by webgemma.js: at another address
  if (!about.pyodide && !chosen) throw failure("no-pyodide");
  const here = (address) => address && new URL(address, import.meta.url).href;
  globalThis.webgemmaXgrammarUrl = here(about.xgrammar); // which is loaded when a reply needs it
  const build = chosen ? `${about.build}-${encodeURIComponent(chosen)}` : about.build;
  const python = await startPython({ build, pyodide: chosen ?? here(about.pyodide), wheel: here(about.wheel) });
  const tab = python.pyimport("webgemma.web.tab").Tab(post);
  await gpuFound;
  await tab.report_device();
  return tab;
})();

const started = Promise.all([pythonStarted, gpuFound]).then(([tab]) => tab);

/** Return a source as Python reads it: missing fields are undefined, which becomes None. */
function sourceSpec({ kind, id, file, url, name, digest, nbytes, mmproj, draft }) {
  const facts = file ? { name: file.name, nbytes: file.size } : { name, nbytes };
  const parts = { mmproj: mmproj && sourceSpec(mmproj), draft: draft && sourceSpec(draft) };
  return { kind, id, file, url, digest: digest ?? undefined, ...parts, ...facts };
}

/** Return messages as JSON, in which images and audio are indices into the list that is returned beside it. */
function withoutMedia(messages) {
  const media = [];
  const isMedia = (value) => value instanceof Blob || ArrayBuffer.isView(value);
  return [JSON.stringify(messages, (_, value) => (isMedia(value) ? media.push(value) - 1 : value)), media];
}

/** Send an adapter's file: Python's bytes become a Blob. */
async function sendAdapter(tab, { id }) {
  const bytes = await tab.tuning.read_adapter(id);
  if (!bytes) return; // the error has been reported
  const view = bytes.getBuffer("u8");
  self.postMessage({ type: "adapter_file", id, blob: new Blob([view.data]) });
  view.release();
  bytes.destroy();
}

/** Send the vectors of texts: Python's bytes become an array of numbers. */
async function sendVectors(tab, { id, texts, task, size }) {
  const bytes = await tab.embed(id, JSON.stringify(texts), task ?? undefined, size ?? undefined);
  if (!bytes) return; // the error has been reported, or they were stopped
  const view = bytes.getBuffer("u8");
  const vectors = new Float32Array(view.data.slice().buffer);
  view.release();
  bytes.destroy();
  self.postMessage({ type: "embedded", id, vectors }, [vectors.buffer]);
}

// Requests of the model, which computes them side by side.
const sharedHandlers = {
  chat: (tab, { id, messages, settings, continue_last }) => {
    const [json, media] = withoutMedia(messages);
    return tab.chat(id, json, JSON.stringify(settings), media, continue_last);
  },
  embed: sendVectors,
};
// Requests that are handled one after the other, and not beside those above.
const queuedHandlers = {
  load: (tab, { source, options, inspected }) =>
    tab.load(sourceSpec(source), options.context ?? undefined, options.precision, inspected ?? undefined),
  examine: (tab, { data, options }) => tab.tuning.examine(data, JSON.stringify(options)),
  tune: (tab, { data, options }) => tab.tuning.tune(data, JSON.stringify(options)),
  apply_adapter: (tab, { id }) => tab.tuning.apply_adapter(id),
  detach_adapter: (tab) => tab.tuning.detach_adapter(),
  search: (tab, { id, request, source, texts, task, vectors, size, question, count }) => {
    const given = {
      load: () => [sourceSpec(source)],
      embed: () => [JSON.stringify(texts), task],
      vectors: () => [vectors, size],
      nearest: () => [question, count],
      free: () => [],
    };
    return tab.searching.handle(id, request, ...given[request]());
  },
};
// Requests that are handled at once.
const immediateHandlers = {
  inspect: (tab, { id, source }) => tab.inspect(id, sourceSpec(source)),
  stop: (tab, { id }) => tab.stop(id),
  probe_gpu_memory: (tab, { nbytes }) => tab.probe_gpu_memory(nbytes),
  store: (tab, { source }) => tab.stored.store(sourceSpec(source)),
  cancel_store: (tab, { id }) => tab.stored.cancel(id),
  delete: (tab, { id }) => tab.delete(id),
  list_stored: (tab) => tab.stored.list(),
  stop_tuning: (tab) => tab.tuning.stop_tuning(),
  list_adapters: (tab) => tab.tuning.list_adapters(),
  add_adapter: (tab, { source }) => tab.add_adapter(sourceSpec(source)),
  read_adapter: sendAdapter,
  delete_adapter: (tab, { id }) => tab.tuning.delete_adapter(id),
};
const TUNING_REQUESTS = [
  "examine", "tune", "stop_tuning", "apply_adapter", "detach_adapter", "list_adapters", "add_adapter", "read_adapter",
  "delete_adapter",
];

const shared = new Set(); // promises of those that have not ended
let queue = started.catch((error) => {
  self.postMessage({ type: "error", kind: error.kind ?? "other", message: String(error.message ?? error) });
});

/** Return the fields of an error that name the request it belongs to. */
function requestFields({ type, id }) {
  if (TUNING_REQUESTS.includes(type)) return { tune: type };
  if (type === "inspect") return { inspect: id };
  if (type === "search") return { search: id };
  return type in immediateHandlers ? { store: id ?? null } : { id };
}

async function handle(handler, request) {
  const tab = await started.catch(() => null); // the error has been reported
  try {
    if (tab) await handler(tab, request);
  } catch (error) {
    const message = String(error.message ?? error).trim().split("\n").at(-1);
    self.postMessage({ type: "error", kind: "other", message, ...requestFields(request) });
  }
}

self.onmessage = ({ data }) => {
  if (data.type in immediateHandlers) handle(immediateHandlers[data.type], data);
  else if (data.type in sharedHandlers) {
    const ended = queue.then(() => handle(sharedHandlers[data.type], data)).then(() => shared.delete(ended));
    shared.add(ended);
  } else if (data.type in queuedHandlers) {
    queue = Promise.all([queue, ...shared]).then(() => handle(queuedHandlers[data.type], data));
  }
};
