// Formulas in Markdown: \(…\), \[…\], $…$, $$…$$ and bare \begin{align}…\end{align}, as a plug-in of markdown-it. What
// counts as a formula between single dollars follows Pandoc, so that "$5 and $10" is none.

export const MAX_TEX = 5000; // characters of a formula; what is longer stays text
const MAX_LINES = 200; // of a formula on lines of its own

const CLOSING = { "\\(": "\\)", "\\[": "\\]", "$$": "$$" };
const DOLLAR = /(?<!\\)\$/g;
const ENVIRONMENT = /\\begin\{((?:equation|align|alignat|gather|multline)\*?)\}/y;
const AMOUNT = /^\d[\d.,]*["”»]?\s+\(?[a-z]{2,}/i; // "5 and 6": money

/** Return where the end of a formula is found from a position on; kept, since a hostile text asks very often. */
function nextIndex(state, name, start, find = (from) => state.src.indexOf(name, from)) {
  state.nextMath ??= {};
  const { from, at } = state.nextMath[name] ?? { from: Infinity, at: -1 };
  const isKnown = from <= start && (at < 0 || at >= start);
  if (!isKnown) state.nextMath[name] = { from: start, at: find(start) };
  return state.nextMath[name].at;
}

/** Return where a formula between single dollars ends, or -1. */
function closingDollar(state) {
  const { src, pos } = state;
  if (/[\w$]/.test(src[pos - 1] ?? " ") || /\s/.test(src[pos + 1] ?? " ")) return -1;
  const end = nextIndex(state, "$", pos + 2, (from) => { // a formula has one character at least
    DOLLAR.lastIndex = from;
    return DOLLAR.exec(src)?.index ?? -1;
  });
  if (end <= pos + 1 || end - pos > MAX_TEX) return -1;
  if (/\s/.test(src[end - 1]) || /[\d$]/.test(src[end + 1] ?? "")) return -1; // "$5–$10 or 20$"
  const tex = src.slice(pos + 1, end);
  const isWithinWord = /[a-z]/i.test(src[end + 1] ?? "") && !/[\w)}\]'!|*]/.test(tex.at(-1)); // $HOME/$USER
  return isWithinWord || AMOUNT.test(tex) || /[`\n]/.test(tex) ? -1 : end;
}

function inlineRule(state, silent) {
  const { src, pos } = state;
  const two = src.slice(pos, pos + 2);
  let end;
  if (two in CLOSING) {
    end = nextIndex(state, CLOSING[two], pos + 2);
    if (end < 0 || end - pos > MAX_TEX || !src.slice(pos + 2, end).trim()) return false;
    end += 2;
  } else if (src[pos] === "$") {
    end = closingDollar(state) + 1;
    if (!end) return false;
  } else return false;
  if (end > state.posMax) return false;
  if (!silent) state.push("math_inline", "", 0).content = src.slice(pos, end);
  state.pos = end;
  return true;
}

/** Return how a formula on lines of its own opens and closes, or null if none begins here. */
function fences(src, start) {
  if (src.startsWith("$$", start)) return ["$$", "$$"];
  if (src.startsWith("\\[", start)) return ["\\[", "\\]"];
  ENVIRONMENT.lastIndex = start;
  const [open, name] = ENVIRONMENT.exec(src) ?? [];
  return open ? [open, `\\end{${name}}`] : null;
}

function blockRule(state, startLine, endLine, silent) {
  if (state.sCount[startLine] - state.blkIndent >= 4) return false; // code
  const start = state.bMarks[startLine] + state.tShift[startLine];
  const found = fences(state.src, start);
  if (!found) return false;
  const [open, close] = found;
  const isAtEnd = state.env.isGrowing && state.src.length - start <= MAX_TEX;
  const end = nextIndex(state, close, start + open.length);
  if (!isAtEnd && (end < 0 || end - start > MAX_TEX)) return false;
  const lines = [];
  let isClosed = false;
  let line = startLine;
  for (; line < endLine && !isClosed; line += 1) {
    const isFirst = line === startLine;
    const isOutside = !isFirst && (state.isEmpty(line) || state.sCount[line] < state.blkIndent);
    if (isOutside || lines.length === MAX_LINES) return false;
    const text = state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
    const at = text.indexOf(close, isFirst ? open.length : 0);
    if (at >= 0 && text.slice(at + close.length).trim()) return false; // the rules within a paragraph read it
    isClosed = at >= 0;
    lines.push(text.trimEnd());
  }
  // While a reply grows, its last lines can be a formula that is not complete.
  if (!isClosed && !state.env.isGrowing) return false;
  const source = lines.join("\n");
  if (source.length > MAX_TEX || source.length <= open.length + close.length) return false;
  if (silent) return true;
  const token = state.push(isClosed ? "math_block" : "math_growing", "", 0);
  token.content = source;
  token.map = [startLine, line];
  state.line = line;
  return true;
}

/** Add formulas to a markdown-it: the tokens math_inline, math_block and math_growing. */
export function mathSyntax(md) {
  md.inline.ruler.before("escape", "math", inlineRule);
  md.block.ruler.before("fence", "math", blockRule, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

/** Whether a formula is shown on a line of its own. */
export const isDisplay = (source) => !source.startsWith("\\(") && !/^\$(?!\$)/.test(source);

/** Return the TeX of a formula without its dollars or brackets. */
export function texOf(source) {
  if (source.startsWith("\\begin")) return source;
  const length = /^\$(?!\$)/.test(source) ? 1 : 2;
  return source.slice(length, -length).trim();
}
