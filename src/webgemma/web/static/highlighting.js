// Colours of code, by highlight.js: loaded with the first code in a language, rarer languages one by one.

import { element } from "./dom.js";

const FOLDER = "./lib/highlight/";
const MAX_LENGTH = 30_000; // of code that is coloured
const MAX_LINE = 2_000; // some grammars are slow on long lines
const MAX_KEPT = 100;
// Languages that are not in highlight.min.js, with their other names.
const MORE = {
  ada: [], apache: ["apacheconf"], awk: [], clojure: ["clj"], cmake: [], crystal: ["cr"], d: [], dart: [],
  delphi: ["pascal", "pas"], dockerfile: ["docker"], dos: ["bat", "batch", "cmd"], elixir: ["ex", "exs"], elm: [],
  erlang: ["erl"], fortran: ["f90", "f95"], fsharp: ["fs", "f#"], glsl: ["wgsl", "hlsl"], gradle: [], groovy: [], haskell: ["hs"],
  http: [], julia: ["jl"], latex: ["tex"], lisp: [], llvm: [], matlab: [], nginx: [], nim: [], nix: [], ocaml: ["ml"],
  powershell: ["ps1", "pwsh"], prolog: [], properties: [], protobuf: ["proto"], scala: [], scheme: ["scm"], tcl: [],
  verilog: ["v", "sv"], vhdl: [], vim: [], x86asm: ["asm", "nasm"],
};
const PLAIN = ["", "text", "txt", "plain", "plaintext", "code", "output", "none"];
const FILES = new Map(Object.entries(MORE).flatMap(([name, others]) => [name, ...others].map((other) => [other, name])));

let highlighter = null;
let loading = null;
const languages = new Map(); // by label: the name of a loaded language, or null if there is none
const loadingLanguages = new Map();
const kept = new Map(); // by label and code

async function load(label) {
  loading ??= import(`${FOLDER}highlight.min.js`);
  highlighter = (await loading).default;
  const file = FILES.get(label);
  if (!highlighter.getLanguage(label) && file) {
    const { default: grammar } = await import(`${FOLDER}languages/${file}.min.js`);
    highlighter.registerLanguage(file, grammar);
    languages.set(label, file);
  } else languages.set(label, highlighter.getLanguage(label) ? label : null);
}

/**
 * Return the nodes of code with colours, null if there are none for its language or so long a text, or a promise: then
 * ask again after it.
 */
export function coloured(code, language) {
  const label = language.toLowerCase();
  if (PLAIN.includes(label) || code.length > MAX_LENGTH || languages.get(label) === null) return null;
  if (!languages.has(label)) {
    if (!loadingLanguages.has(label)) {
      loadingLanguages.set(label, load(label).catch(() => languages.set(label, null))); // offline: no colours
    }
    return loadingLanguages.get(label);
  }
  const key = `${label} ${code}`;
  if (!kept.has(key)) {
    if (kept.size >= MAX_KEPT) kept.delete(kept.keys().next().value);
    kept.set(key, withColours(code, languages.get(label)));
  }
  return kept.get(key)?.cloneNode(true) ?? null;
}

/** Append copies of nodes: texts, and spans with a class. */
function copyColours(from, to) {
  for (const node of from.childNodes) {
    if (node.nodeType === Node.TEXT_NODE) to.append(node.data);
    else if (node.localName === "span") to.append(copyColours(node, element("span", node.className)));
  }
  return to;
}

function withColours(code, language) {
  if (new RegExp(`.{${MAX_LINE}}`).test(code)) return null;
  const { value } = highlighter.highlight(code, { language, ignoreIllegals: true });
  const { body } = new DOMParser().parseFromString(`<body><pre>\n${value}</pre>`, "text/html");
  const nodes = copyColours(body.firstChild, document.createDocumentFragment());
  return nodes.textContent === code ? nodes : null; // the code itself never changes
}
