// The page's engine: Python with our wheel, which computes on this browser's GPU. What it is asked and
// what it tells is said in engine.js.
import "/package/device/replay.js"; // offers Python this browser's GPU,
import "/package/gguf/files.js"; // its files,
import "/package/media/browser.js"; // and its decoders
import { startPython } from "./python.js";

const NO_PYODIDE = "This server has no Pyodide, which runs Python here: see what it said when it started.";

const post = (text) => self.postMessage(JSON.parse(text));

const started = (async () => {
  navigator.gpu?.requestAdapter().catch(() => {}); // wakes the GPU up while Python starts
  const about = await (await fetch("/api/about")).json();
  if (!about.pyodide) throw new Error(NO_PYODIDE);
  const python = await startPython(about);
  const tab = python.pyimport("webgemma.web.tab").Tab(post);
  await tab.greet();
  return tab;
})();

// A source as Python sees it: what is not said is undefined, which Python knows as None.
function given({ kind, id, file, url, name, digest, nbytes, eyes }) {
  const said = file ? { name: file.name, nbytes: file.size } : { name, nbytes };
  return { kind, id, file, url, digest: digest ?? undefined, eyes: eyes && given(eyes), ...said };
}

// A chat as Python reads it: JSON, in which pictures and sounds are numbers of those in a list.
function written(messages) {
  const media = [];
  const isMedia = (value) => value instanceof Blob || ArrayBuffer.isView(value);
  return [JSON.stringify(messages, (_, value) => (isMedia(value) ? media.push(value) - 1 : value)), media];
}

// An adapter's file: bytes of Python's become a Blob.
async function tellAdapter(tab, { id }) {
  const bytes = await tab.tuning.adapter(id);
  if (!bytes) return; // why has been told
  const view = bytes.getBuffer("u8");
  self.postMessage({ type: "adapter", id, blob: new Blob([view.data]) });
  view.release();
  bytes.destroy();
}

// These wait for each other.
const inTurn = {
  load: (tab, { source, options }) => tab.load(given(source), options.context ?? undefined, options.precision),
  chat: (tab, { id, messages, settings }) => {
    const [json, media] = written(messages);
    return tab.chat(id, json, JSON.stringify(settings), media);
  },
  unload: (tab) => tab.unload(),
  examine: (tab, { data, options }) => tab.tuning.examine(data, JSON.stringify(options)),
  tune: (tab, { data, options }) => tab.tuning.tune(data, JSON.stringify(options)),
  put_on: (tab, { id }) => tab.tuning.put_on(id),
  take_off: (tab) => tab.tuning.take_off(),
};
// These do not.
const atOnce = {
  stop: (tab, { id }) => tab.stop(id),
  room: (tab, { nbytes }) => tab.room(nbytes),
  keep: (tab, { source }) => tab.keep(given(source)),
  leave: (tab, { id }) => tab.leave(id),
  forget: (tab, { id }) => tab.forget(id),
  stored: (tab) => tab.stored(),
  enough: (tab) => tab.tuning.enough(),
  adapters: (tab) => tab.tuning.adapters(),
  adapter: tellAdapter,
  forget_adapter: (tab, { id }) => tab.tuning.forget_adapter(id),
};
const ofTuning = ["examine", "tune", "enough", "put_on", "take_off", "adapters", "adapter", "forget_adapter"];

let turn = started.catch((error) => {
  self.postMessage({ type: "error", kind: "other", sentence: String(error.message ?? error) });
});

// What an error belongs to.
function about({ type, id }) {
  if (ofTuning.includes(type)) return { tune: type };
  return type in atOnce ? { keep: id ?? null } : { id };
}

async function answer(act, data) {
  const tab = await started.catch(() => null); // why there is none has been told
  try {
    if (tab) await act(tab, data);
  } catch (error) {
    const sentence = String(error.message ?? error).trim().split("\n").at(-1);
    self.postMessage({ type: "error", kind: "other", sentence, ...about(data) });
  }
}

self.onmessage = ({ data }) => {
  if (data.type in atOnce) answer(atOnce[data.type], data);
  else if (data.type in inTurn) turn = turn.then(() => answer(inTurn[data.type], data));
};
