// Colours of code, by highlight.js in a worker that starts with the first code.

import { element } from "./dom.js";

const MAX_LENGTH = 30_000; // of code that is coloured
const MAX_KEPT = 100;
const LIMIT_MILLISECONDS = 5000; // for one text: then the worker is ended, and the code has no colours
const PLAIN = ["", "text", "txt", "plain", "plaintext", "code", "output", "none"];

const kept = new Map(); // by label and code: nodes, or null
const asked = new Map(); // by id: what to do with the answer
let worker = null;
let requests = 0;

function start() {
  worker = new Worker(new URL("./highlight_worker.js", import.meta.url), { type: "module" });
  worker.addEventListener("message", ({ data: { id, html } }) => asked.get(id)?.(html));
  worker.addEventListener("error", () => end());
}

/** End the worker; what it was asked has no colours. */
function end() {
  worker?.terminate();
  worker = null;
  for (const answer of [...asked.values()]) answer(null);
}

let queue = Promise.resolve(); // one text at a time: the limit is that of one

function html(label, code) {
  const answered = queue.then(() => new Promise((resolve) => {
    if (!worker) start();
    const id = requests += 1;
    const timer = setTimeout(end, LIMIT_MILLISECONDS);
    asked.set(id, (answer) => {
      clearTimeout(timer);
      asked.delete(id);
      resolve(answer);
    });
    worker.postMessage({ id, label, code });
  }));
  queue = answered;
  return answered;
}

/** Append copies of nodes: texts, and spans with a class. */
function copyColours(from, to) {
  for (const node of from.childNodes) {
    if (node.nodeType === Node.TEXT_NODE) to.append(node.data);
    else if (node.localName === "span") to.append(copyColours(node, element("span", node.className)));
  }
  return to;
}

/** Return the nodes of highlight.js's HTML, or null if they are not the code, which never changes. */
function nodesOf(coloured, code) {
  if (coloured === null) return null;
  const { body } = new DOMParser().parseFromString(`<body><pre>\n${coloured}</pre>`, "text/html");
  const nodes = copyColours(body.firstChild, document.createDocumentFragment());
  return nodes.textContent === code ? nodes : null;
}

/** Return the nodes of code with colours, or null if it gets none; or a promise of them. */
export function coloured(code, language) {
  const label = language.toLowerCase();
  if (PLAIN.includes(label) || code.length > MAX_LENGTH) return null;
  const key = `${label} ${code}`;
  const known = () => kept.get(key)?.cloneNode(true) ?? null;
  if (kept.has(key)) return known();
  return html(label, code).then((answer) => {
    if (kept.size >= MAX_KEPT) kept.delete(kept.keys().next().value);
    kept.set(key, nodesOf(answer, code));
    return known();
  });
}
