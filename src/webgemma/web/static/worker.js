// The page's engine: Python with our wheel, which computes on this browser's GPU. What it is asked and
// what it tells is said in engine.js.
import "/package/device/replay.js"; // offers Python this browser's GPU

const NO_PYODIDE = "This server has no Pyodide, which runs Python here: see what it said when it started.";

const post = (text) => self.postMessage(JSON.parse(text));

const started = (async () => {
  const about = await (await fetch("/api/about")).json();
  if (!about.pyodide) throw new Error(NO_PYODIDE);
  const { loadPyodide } = await import("/pyodide/pyodide.mjs");
  const python = await loadPyodide({ indexURL: "/pyodide/" });
  const wheel = await (await fetch(about.wheel)).arrayBuffer();
  python.unpackArchive(wheel, "whl");
  const tab = python.pyimport("webgemma.web.tab").Tab(post);
  await tab.greet();
  return tab;
})();

// How Python reads a model: some bytes at a time, wherever they are.
function reader(source) {
  if (source.kind === "file") {
    const { file } = source;
    return { name: file.name, nbytes: file.size, read: (begin, end) => file.slice(begin, end).arrayBuffer() };
  }
  const read = async (begin, end) => {
    const answer = await fetch(source.url, { headers: { Range: `bytes=${begin}-${end - 1}` } });
    if (answer.status !== 206) throw new Error(`${source.name}: the server answers ${answer.status}.`);
    return answer.arrayBuffer();
  };
  return { name: source.name, nbytes: source.nbytes, read };
}

const asked = {
  async load(tab, { source, options }) {
    const { name, nbytes, read } = source.kind === "bundled" ? {} : reader(source);
    await tab.load(name, nbytes, read, options.context ?? undefined, options.precision);
  },
  chat: (tab, { id, messages, settings }) => tab.chat(id, JSON.stringify(messages), JSON.stringify(settings)),
  unload: (tab) => tab.unload(),
};

let turn = started.catch((error) => {
  self.postMessage({ type: "error", kind: "other", sentence: String(error.message ?? error) });
});

async function answer(data) {
  const tab = await started.catch(() => null); // why there is none has been told
  try {
    if (tab) await asked[data.type](tab, data);
  } catch (error) {
    const sentence = String(error.message ?? error).trim().split("\n").at(-1);
    self.postMessage({ type: "error", id: data.id, kind: "other", sentence });
  }
}

self.onmessage = ({ data }) => {
  if (data.type === "stop") {
    started.then((tab) => tab.stop(data.id), () => {});
  } else if (data.type in asked) {
    turn = turn.then(() => answer(data));
  }
};
