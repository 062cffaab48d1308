// Formulas of TeX as MathML, by Temml, which is loaded with the first one.

import { MAX_TEX } from "./math_syntax.js";

const FOLDER = new URL("./lib/temml/", import.meta.url);
const OPTIONS = { throwOnError: true, trust: false, maxSize: [20, 300], maxExpand: 1000 };
const MAX_KEPT = 500; // formulas, which a growing paragraph shows again and again
// Definitions would let a short text expand to a long one.
const DEFINES = /\\(?:[egx]?def|let|futurelet|global|long|(?:re|provide)?(?:new)?command|newenvironment|Declare\w+)(?![a-zA-Z])/;
const ELEMENTS = new Set([
  "math", "menclose", "merror", "mfrac", "mi", "mmultiscripts", "mn", "mo", "mover", "mpadded", "mphantom", "mprescripts",
  "mroot", "mrow", "ms", "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder",
  "munderover", "none", "semantics",
]);
const ATTRIBUTES = new Set([
  "accent", "accentunder", "columnalign", "columnlines", "columnspacing", "columnspan", "depth", "display", "displaystyle",
  "fence", "form", "height", "largeop", "linethickness", "lspace", "mathbackground", "mathcolor", "mathsize", "mathvariant",
  "maxsize", "minsize", "movablelimits", "notation", "rowlines", "rowspacing", "rowspan", "rspace", "scriptlevel", "separator",
  "stretchy", "symmetric", "voffset", "width",
]);

let temml = null;
let loading = null;
const kept = new Map(); // by display and TeX: the element, or null if the TeX has an error

/** Whether formulas can be made now. */
export const hasMath = () => temml !== null;

/** Load Temml and its style sheet, once. */
export function loadMath() {
  loading ??= new Promise((resolve, reject) => {
    const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: new URL("Temml-Local.css", FOLDER) });
    const script = Object.assign(document.createElement("script"), { src: new URL("temml.min.js", FOLDER) });
    script.addEventListener("load", () => {
      ({ temml } = window);
      resolve();
    });
    script.addEventListener("error", () => {
      loading = null; // the next formula tries again
      reject(new Error("Temml could not be loaded."));
    });
    document.head.append(style, script);
  });
  return loading;
}

/** Keep of Temml's tree what is MathML without names or addresses; throw an Error if it has something else. */
function clean(node) {
  if (typeof node.text === "string" && !node.children) return;
  const isFragment = !node.type && !node.attributes && !node.href && !node.src;
  const isSpan = !node.type && node.attributes && !node.href; // of text within a formula
  if (!isFragment && !isSpan && !ELEMENTS.has(node.type)) throw new Error(`${node.type} is not allowed.`);
  for (const [name, value] of Object.entries(node.attributes ?? {})) {
    if (ATTRIBUTES.has(name)) continue;
    delete node.attributes[name];
    if (name !== "style") continue;
    for (const [property, setting] of value.split(";").map((part) => part.split(":"))) {
      if (setting) node.style[property.trim()] = setting.trim(); // the policy refuses the attribute
    }
  }
  for (const child of node.children) clean(child);
}

function made(tex, isDisplay) {
  if (tex.length > MAX_TEX || DEFINES.test(tex)) return null;
  try {
    const tree = temml.__renderToMathMLTree(tex, { ...OPTIONS, displayMode: isDisplay, macros: {} });
    clean(tree);
    const node = tree.toNode();
    return node.localName === "math" ? node : null;
  } catch {
    return null; // an error in the TeX, or nested too deeply
  }
}

/** Return the element of a formula, or null if its TeX has an error; `hasMath` must be true. */
export function formula(tex, isDisplay) {
  const key = `${isDisplay} ${tex}`;
  if (!kept.has(key)) {
    if (kept.size >= MAX_KEPT) kept.delete(kept.keys().next().value);
    kept.set(key, made(tex, isDisplay));
  }
  return kept.get(key)?.cloneNode(true) ?? null;
}

/** Whether a formula was made before. */
export const isKept = (tex, isDisplay) => kept.has(`${isDisplay} ${tex}`);
