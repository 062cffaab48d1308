// Python as a tool: each program runs in an interpreter of its own, which begins with nothing, reaches nothing, and is
// ended after it. Pyodide's files are fetched by the page and handed in, so that the interpreter needs no connection.
//
// The interpreter is a worker of a data: address in a frame with sandbox="allow-scripts": both have opaque origins,
// without cookies, storage or a way to the page but one port; the frame's policy allows no connection at all.

import { t } from "./language.js";

const START_SECONDS = 120; // to start Python, which also waits for its files
const RUN_SECONDS = 20; // of a program
const MAX_CODE = 100_000; // characters
const MAX_TEXT = 20_000; // characters that the model gets
const POLICY = (nonce) => `default-src 'none'; script-src 'nonce-${nonce}' 'wasm-unsafe-eval'; worker-src data:`;
const CUT = "\n[The output was cut here: it is too long.]";

const read = async (url, as) => {
  const response = await fetch(url);
  if (!response.ok) throw new Error(await response.text());
  return response[as]();
};

/** Return the worker's script and Pyodide's other files, from the folder at an address. */
async function filesOf(folder) {
  const of = (name) => new URL(name, new URL(folder, document.baseURI));
  const ours = (name) => read(new URL(name, import.meta.url), "text");
  const [frame, sandbox, engine, loader, { info }, wasm, library] = await Promise.all([
    ours("python_frame.js"), ours("python_sandbox.js"),
    read(of("pyodide.asm.mjs"), "text"), read(of("pyodide.mjs"), "text"), read(of("pyodide-lock.json"), "json"),
    read(of("pyodide.asm.wasm"), "arrayBuffer"), read(of("python_stdlib.zip"), "arrayBuffer"),
  ]);
  const create = engine.match(/export default (\w+);/)[1];
  const load = loader.match(/(\w+) as loadPyodide\b/)[1];
  const names = `const createPyodide = ${create}, loadPyodide = ${load};`;
  const script = [engine, loader, names, sandbox, "//# sourceURL=python.js"].join("\n");
  return { frame, script, info, files: { "pyodide.asm.wasm": wasm, "python_stdlib.zip": library } };
}

/** Return a sandboxed frame, which is on the page, with a script. */
function framed(script) {
  const frame = document.createElement("iframe");
  const nonce = crypto.getRandomValues(new Uint32Array(4)).join("");
  frame.setAttribute("sandbox", "allow-scripts");
  frame.hidden = true;
  frame.title = t("Python");
  frame.srcdoc = `<!doctype html><meta http-equiv="Content-Security-Policy" content="${POLICY(nonce)}"><script nonce="${nonce}">${script}</script>`;
  document.body.append(frame);
  return frame;
}

/** Send a task to the worker of a frame; return what it reports. */
function reported(frame, { script, files, task }, signal) {
  const { port1, port2 } = new MessageChannel();
  return new Promise((resolve, reject) => {
    const end = (message) => reject(new Error(message));
    let timer = setTimeout(() => end(`Python did not start within ${START_SECONDS} seconds.`), 1000 * START_SECONDS);
    signal.addEventListener("abort", () => end("The user stopped this call."), { once: true });
    port1.onmessage = ({ data }) => {
      clearTimeout(timer);
      if (data?.isStarted === true) {
        timer = setTimeout(() => end(`The program was stopped after ${RUN_SECONDS} seconds.`), 1000 * RUN_SECONDS);
      } else resolve(data);
    };
    frame.addEventListener("load", () => frame.contentWindow.postMessage({ script, files, task }, "*", [port2, ...Object.values(files)]));
  }).finally(() => port1.close());
}

/**
 * Run a program with Pyodide's files at an address; return {text, hasFailed}: what it has printed, with the value of
 * its last line or the error that ended it. Throw an Error if it could not run or was stopped.
 */
export async function runPython({ code }, folder, signal) {
  if (typeof code !== "string" || !code.trim()) throw new Error("There is no code to run.");
  if (code.length > MAX_CODE) throw new Error(`The code is longer than ${MAX_CODE} characters.`);
  const { frame: script, info, ...needed } = await filesOf(folder);
  signal.throwIfAborted();
  const frame = framed(script);
  try {
    const report = await reported(frame, { ...needed, task: { info, code } }, signal);
    if (typeof report?.output !== "string") throw new Error(`Python failed: ${String(report?.problem ?? "it reported nothing").slice(0, 500)}`);
    const isCut = report.isCut === true || report.output.length > MAX_TEXT;
    const text = report.output.slice(0, MAX_TEXT).trimEnd() + (isCut ? CUT : "");
    return { text: text || "(The program has printed nothing.)", hasFailed: report.hasFailed === true };
  } finally {
    frame.remove(); // which ends the worker, whatever it does
  }
}
