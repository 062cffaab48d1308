// Block Markdown to DOM nodes, never through HTML, so that text of a model cannot run scripts.

import { element } from "./dom.js";
import { inlineNodes } from "./inline.js";

const MAX_DEPTH = 8; // of nested quotes and lists; deeper ones are plain text
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(\S.*)$/;
const RULE = /^ {0,3}(?:-[ \t]*){3,}$|^ {0,3}(?:\*[ \t]*){3,}$|^ {0,3}(?:_[ \t]*){3,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const BLANK = /^\s*$/;

/** Show `text` in `container`; leading blocks that are unchanged keep their nodes. */
export function showMarkdown(container, text) {
  const blocks = splitBlocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
  const shown = container.markdownBlocks ?? [];
  let same = 0;
  while (same < shown.length && same < blocks.length && shown[same] === blocks[same].source) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(block.node());
  container.markdownBlocks = blocks.map((block) => block.source);
  levelHeadings(container);
}

/** Show `text` in `container` as one block of code; the block stays while the text grows. */
export function showCode(container, text, language) {
  if (container.markdownBlocks?.[0] !== language) container.replaceChildren(codeBlock("", language));
  container.markdownBlocks = [language]; // no source of a block
  container.querySelector("code").textContent = text;
}

/** Let no heading be more than one level below the one before: a reply may begin with ###. */
function levelHeadings(container) {
  let last = 3; // the heading of a message
  for (const heading of container.querySelectorAll("h3, h4, h5, h6")) {
    const level = Number(heading.tagName[1]);
    last = Math.min(level, last + 1);
    if (last < level) heading.ariaLevel = last;
  }
}

function blockNodes(lines, depth) {
  return splitBlocks(lines, depth).map((block) => block.node());
}

/** Return the blocks of lines, each with its source and a function that builds its node. */
function splitBlocks(lines, depth) {
  const readers = depth < MAX_DEPTH
    ? [readFence, readHeading, readRule, readQuote, readList, readTable, readParagraph]
    : [readFence, readParagraph];
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (BLANK.test(lines[at])) {
      at += 1;
      continue;
    }
    for (const read of readers) {
      const found = read(lines, at, depth);
      if (!found) continue;
      const source = `${read.name}\n${lines.slice(at, found.end).join("\n")}`;
      blocks.push({ source, node: found.node });
      at = found.end;
      break;
    }
  }
  return blocks;
}

function startsBlock(lines, at) {
  const line = lines[at];
  return BLANK.test(line) || FENCE.test(line) || HEADING.test(line) || RULE.test(line)
    || QUOTE.test(line) || ITEM.test(line) || tableColumns(lines, at) !== null;
}

function readFence(lines, at) {
  const [, indent, fence, label] = FENCE.exec(lines[at]) ?? [];
  if (!fence) return null;
  let end = at + 1;
  const closes = (line) => {
    const mark = line.trim();
    return mark.length >= fence.length && mark === fence[0].repeat(mark.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const margin = new RegExp(`^ {0,${indent.length}}`);
  const code = lines.slice(at + 1, end).map((line) => line.replace(margin, "")).join("\n");
  return { end: Math.min(end + 1, lines.length), node: () => codeBlock(code, label.trim().split(/\s/)[0]) };
}

function codeBlock(code, language) {
  const copy = element("button", "quiet", "Copy code");
  copy.type = "button";
  copy.dataset.copy = "code"; // messages.js handles the click
  const block = element("pre", "", element("code", "", code));
  block.tabIndex = 0; // scrollable by keyboard
  block.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  block.setAttribute("role", "group");
  return element("figure", "code", element("figcaption", "", element("span", "", language || "code"), copy), block);
}

function readHeading(lines, at) {
  const [, hashes, title] = HEADING.exec(lines[at]) ?? [];
  if (!hashes) return null;
  const tag = `h${Math.min(6, hashes.length + 2)}`; // below the headings of the page
  return { end: at + 1, node: () => element(tag, "", inlineNodes(title.trimEnd().replace(/[ \t]#+$/, ""))) };
}

function readRule(lines, at) {
  return RULE.test(lines[at]) ? { end: at + 1, node: () => element("hr") } : null;
}

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  if (end === at) return null;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { end, node: () => element("blockquote", "", blockNodes(inside, depth + 1)) };
}

function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const kind = first[2].at(-1);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[2].at(-1) !== kind || RULE.test(lines[end])) break;
    const read = readItem(lines, end, item);
    items.push(read.inside);
    end = read.end;
    let next = end;
    while (next < lines.length && BLANK.test(lines[next])) next += 1;
    if (next < lines.length && ITEM.test(lines[next])) end = next;
  }
  return { end, node: () => listNode(first[2], items, depth) };
}

/** Return the lines of one item without its indent: deeper indented ones, and the rest of its paragraph. */
function readItem(lines, at, [matched, indent, mark]) {
  const width = Math.min(matched.length, indent.length + mark.length + 4) || 1;
  const inside = [lines[at].slice(matched.length)];
  let end = at + 1;
  for (let line = end; line < lines.length; line += 1) {
    const blank = BLANK.test(lines[line]);
    const space = blank ? 0 : lines[line].search(/\S/);
    const further = !blank && (space >= width || (space > indent.length && space >= 2));
    const continues = !blank && !BLANK.test(lines[line - 1]) && !startsBlock(lines, line);
    if (!blank && !further && !continues) break;
    inside.push(lines[line].slice(Math.min(space, width)));
    if (!blank) end = line + 1;
  }
  return { inside: inside.slice(0, end - at), end };
}

function listNode(mark, items, depth) {
  const list = element(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) list.start = parseInt(mark, 10);
  for (const inside of items) {
    const nodes = blockNodes(inside, depth + 1);
    const [only] = nodes;
    const tight = only?.tagName === "P"; // the text of an item is not wrapped in a paragraph
    list.append(element("li", "", (tight ? [...only.childNodes, ...nodes.slice(1)] : nodes)));
  }
  return list;
}

function cells(line) {
  const parts = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (parts.length > 1 && BLANK.test(parts.at(-1))) parts.pop();
  return parts.map((part) => part.trim().replaceAll("\\|", "|"));
}

/** Return the alignment of each column of the table that starts here, or null if none does. */
function tableColumns(lines, at) {
  const rule = lines[at + 1];
  if (!lines[at].includes("|") || rule === undefined || !/^[ \t|:-]+$/.test(rule)) return null;
  const columns = cells(rule);
  if (columns.length !== cells(lines[at]).length || !columns.every((cell) => /^:?-+:?$/.test(cell))) return null;
  return columns.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "end") : ""));
}

function readTable(lines, at) {
  const columns = tableColumns(lines, at);
  if (!columns) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (tag, line) => {
    const texts = cells(line);
    return element("tr", "", columns.map((align, i) => element(tag, align, inlineNodes(texts[i] ?? ""))));
  };
  return {
    end,
    node: () => element("div", "table", element("table", "",
      element("thead", "", row("th", lines[at])),
      element("tbody", "", lines.slice(at + 2, end).map((line) => row("td", line))))),
  };
}

function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !startsBlock(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n"); // line breaks are kept
  return { end, node: () => element("p", "", inlineNodes(text)) };
}
