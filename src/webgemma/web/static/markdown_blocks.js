// Markdown to blocks of tokens, by markdown-it. HTML within a text stays text, except <br>, <sub> and <sup>.

import MarkdownIt from "./lib/markdown-it/markdown-it.esm.min.mjs";
import footnotes from "./lib/markdown-it-footnote/index.mjs";
import { mathSyntax } from "./math_syntax.js";

const PROTOCOLS = ["http:", "https:", "mailto:"];
const MAX_LEVEL = 16; // of nested quotes (one each) and lists (two each); what is deeper is plain text
const MAX_EMPHASES = 12; // within each other
const MAX_LABEL = 40; // characters of the language of code
const EMPHASES = ["em", "strong", "s"];
const CODE = { fence: true, code_block: true };
const SHOWN = ["type", "tag", "attrs", "hidden", "content", "info", "children", "meta", "align", "id", "subId", "isDone", "isTask"];
const HTML_TAG = /<(\/?)(br|sub|sup)[ \t]*\/?>/iy;
const TASK = /^\[([ xX])\][ \t]+(?=\S)/;
const HIGHEST = 2; // headings of the page that are above those of a message

const md = new MarkdownIt({ html: false, breaks: true, linkify: true, typographer: false });
md.use(footnotes).use(mathSyntax);
md.inline.ruler.disable("footnote_inline"); // "2^[n]" is no footnote

// Links: absolute ones only, shown as they are written.
const absolute = (text) => {
  try {
    const url = new URL(text);
    return PROTOCOLS.includes(url.protocol) ? url.href : "";
  } catch {
    return "";
  }
};
md.normalizeLink = absolute;
md.validateLink = (url) => url !== "";
md.normalizeLinkText = (text) => text; // no other spelling of a name may be shown
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
md.linkify.add("ftp:", null).add("//", null);

// Quotes and lists nested too deeply: the lines up to an empty one are a paragraph.
md.block.ruler.before("blockquote", "deep", (state, startLine, endLine, silent) => {
  if (state.level < MAX_LEVEL || silent) return false;
  let line = startLine + 1;
  while (line < endLine && !state.isEmpty(line)) line += 1;
  const text = state.getLines(startLine, line, state.blkIndent, false).trim();
  const open = state.push("paragraph_open", "p", 1);
  const inline = state.push("inline", "", 0);
  state.push("paragraph_close", "p", -1);
  open.map = inline.map = [startLine, line];
  inline.content = text;
  inline.children = [];
  state.line = line;
  return true;
});

/** Return where the last `</sub>` or `</sup>` of a text is. */
function lastClosing(state, name) {
  state.lastClosings ??= {};
  state.lastClosings[name] ??= state.src.toLowerCase().lastIndexOf(`</${name}>`);
  return state.lastClosings[name];
}

md.inline.ruler.before("autolink", "html_tag", (state, silent) => {
  HTML_TAG.lastIndex = state.pos;
  const [found, slash, tag] = HTML_TAG.exec(state.src) ?? [];
  if (!found || state.pos + found.length > state.posMax) return false;
  const name = tag.toLowerCase();
  state.openTags ??= [];
  if (name === "br") {
    if (slash) return false;
    if (!silent) state.push("hardbreak", "br", 0);
  } else if (slash) {
    if (state.openTags.at(-1) !== name) return false;
    if (!silent) {
      state.openTags.pop();
      state.push(`${name}_close`, name, -1);
    }
  } else {
    if (lastClosing(state, name) < state.pos) return false; // the text speaks about the tag
    if (!silent) {
      state.openTags.push(name);
      state.push(`${name}_open`, name, 1);
    }
  }
  state.pos += found.length;
  return true;
});

/** Turn images into links, which load nothing, and emphases nested too deeply into text. */
function mendInline({ children }, Token) {
  const text = (content) => Object.assign(new Token("text", "", 0), { content });
  let isInLink = false;
  let depth = 0;
  return children.flatMap((token) => {
    if (token.type === "link_open") isInLink = true;
    if (token.type === "link_close") isInLink = false;
    if (token.type === "image") {
      const shown = text(token.content || token.attrGet("src"));
      if (isInLink) return [shown];
      const open = new Token("link_open", "a", 1);
      open.attrSet("href", token.attrGet("src"));
      return [open, shown, new Token("link_close", "a", -1)];
    }
    if (!EMPHASES.includes(token.tag)) return [token];
    if (token.nesting < 0) depth -= 1;
    const isTooDeep = depth >= MAX_EMPHASES;
    if (token.nesting > 0) depth += 1;
    if (isTooDeep) return [text(token.markup)];
    if (token.tag === "s") token.tag = "del";
    return [token];
  });
}

/** Turn "[ ] " or "[x] " at the start of a list item into a token `task`. */
function markTask(item, paragraph, inline, Token) {
  const [first] = inline?.children ?? [];
  const [mark, state] = (paragraph?.type === "paragraph_open" && first?.type === "text" && TASK.exec(inline.content)) || [];
  if (!mark || !first.content.startsWith(mark.trimEnd())) return;
  first.content = first.content.slice(mark.length);
  const task = new Token("task", "", 0);
  task.meta = { isDone: state !== " " };
  inline.children.unshift(task);
  item.meta = { isTask: true };
}

md.core.ruler.push("page", ({ tokens, Token }) => {
  tokens.forEach((token, i) => {
    if (token.type === "inline") token.children = mendInline(token, Token);
    else if (token.tag?.match(/^h[1-6]$/)) token.tag = `h${Math.min(6, Number(token.tag[1]) + HIGHEST)}`;
    else if (token.type === "list_item_open") markTask(token, tokens[i + 1], tokens[i + 2], Token);
    else if (token.type === "th_open" || token.type === "td_open") {
      token.meta = { align: token.attrGet("style")?.slice("text-align:".length) };
    }
  });
});

/** Return tokens in groups, one for each block that is in no other one. */
function topLevel(tokens) {
  const groups = [];
  let depth = 0;
  for (const token of tokens) {
    if (!depth) groups.push([]);
    groups.at(-1).push(token);
    depth += token.nesting;
  }
  return groups;
}

/**
 * Return the blocks of a text: {code, language} or {tokens}, each with the number of its first line. While the text
 * grows, `isGrowing`, an incomplete formula at its end is one already.
 */
export function blocksOf(text, isGrowing) {
  return topLevel(md.parse(text, { isGrowing })).map((tokens) => {
    const [first] = tokens;
    return first.type in CODE ? { ...codeOf(first), line: first.map[0] } : { tokens, line: first.map?.[0] };
  });
}

/** Return code and language of a token of a block of code. */
export const codeOf = ({ content, info }) => ({ code: content.replace(/\n$/, ""), language: info.trim().split(/\s/)[0].slice(0, MAX_LABEL) });

/** Return a text that is the same for tokens that are shown in the same way. */
export const keyOf = (tokens) => JSON.stringify(tokens, SHOWN);

/** Return the line from which on lines that are added to a text of complete lines can change its blocks. */
export function openLine(text, isGrowing) {
  const tokens = [];
  md.block.parse(text, md, { isGrowing }, tokens);
  return topLevel(tokens).at(-1)?.[0].map?.[0] ?? 0;
}
