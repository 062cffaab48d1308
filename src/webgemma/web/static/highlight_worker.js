// Colours of code in a worker, where a grammar that is slow on some text holds up nothing.

import highlighter from "./lib/highlight/highlight.min.js";

// Languages that are not in highlight.min.js, with their other names.
const MORE = {
  ada: [], apache: ["apacheconf"], awk: [], clojure: ["clj"], cmake: [], crystal: ["cr"], d: [], dart: [],
  delphi: ["pascal", "pas"], dockerfile: ["docker"], dos: ["bat", "batch", "cmd"], elixir: ["ex", "exs"], elm: [],
  erlang: ["erl"], fortran: ["f90", "f95"], fsharp: ["fs", "f#"], glsl: ["wgsl", "hlsl"], gradle: [], groovy: [], haskell: ["hs"],
  http: [], julia: ["jl"], latex: ["tex"], lisp: [], llvm: [], matlab: [], nginx: [], nim: [], nix: [], ocaml: ["ml"],
  powershell: ["ps1", "pwsh"], prolog: [], properties: [], protobuf: ["proto"], scala: [], scheme: ["scm"], tcl: [],
  verilog: ["v", "sv"], vhdl: [], vim: [], x86asm: ["asm", "nasm"],
};
const FILES = new Map(Object.entries(MORE).flatMap(([name, others]) => [name, ...others].map((other) => [other, name])));

/** Return the name of a language that can be coloured, or null. */
async function known(label) {
  if (highlighter.getLanguage(label)) return label;
  const file = FILES.get(label);
  if (!file) return null;
  const { default: grammar } = await import(`./lib/highlight/languages/${file}.min.js`);
  highlighter.registerLanguage(file, grammar);
  return file;
}

addEventListener("message", async ({ data: { id, label, code } }) => {
  let html = null;
  try {
    const language = await known(label);
    if (language) html = highlighter.highlight(code, { language, ignoreIllegals: true }).value;
  } catch { /* offline: the code has no colours */ }
  postMessage({ id, html });
});
