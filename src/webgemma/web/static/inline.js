// Inline Markdown: emphasis, code, links. Builds DOM nodes only, in time linear in the text.

import { element } from "./dom.js";

const TAGS = { "*": "em", "_": "em", "**": "strong", "__": "strong", "~~": "del" };
const MAX_DEPTH = 12; // of nested emphasis
const PROTOCOLS = ["http:", "https:", "mailto:"];

const LINK = /!?\[([^[\]]*)\]\(\s*<?((?:[^\s()<>]|\([^\s()<>]*\))+)>?(?:\s+"[^"]*")?\s*\)/y;
const URL_TEXT = /<?((?:https?:\/\/|mailto:)[^\s<>"'`|*]+)>?/y;
const MARK = /\*{1,3}|_{1,3}|~~/y;
const PLAIN = /[^\\`![<*_~hm\n]+|[\s\S]/y;

/** Return an absolute URL of an allowed protocol, else null. */
function safeUrl(text) {
  try {
    const url = new URL(text);
    return PROTOCOLS.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function anchor(url, children) {
  const link = element("a", "", children);
  link.href = url;
  link.title = url; // the text of a link may look like another URL
  link.rel = "noopener noreferrer";
  link.target = "_blank";
  return link;
}

/** Return the nodes of a text within a block. */
export function inlineNodes(text, insideLink = false) {
  return new InlineParser(text, insideLink).nodes();
}

/** A parser of one text: `frames` are the open emphases, the first one is the text itself. */
class InlineParser {
  constructor(text, insideLink) {
    this.text = text;
    this.insideLink = insideLink;
    this.at = 0;
    this.frames = [{ mark: "", children: [] }];
    this.unclosed = new Set(); // lengths of backtick runs that do not occur again
  }

  nodes() {
    while (this.at < this.text.length) {
      this.escape() || this.code() || this.link() || this.bareUrl() || this.marks() || this.plain();
    }
    this.dropTo(1);
    return this.frames[0].children;
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  put(node) {
    const { children } = this.frames.at(-1);
    if (typeof node === "string" && typeof children.at(-1) === "string") {
      children[children.length - 1] += node;
    } else {
      children.push(node);
    }
  }

  take(found, node) {
    this.put(node);
    this.at += found[0].length;
    return true;
  }

  escape() {
    const found = this.match(/\\([!-/:-@[-`{-~])/y);
    return found && this.take(found, found[1]);
  }

  code() {
    const run = this.match(/`+/y)?.[0];
    if (!run) return false;
    const start = this.at + run.length;
    let end = this.unclosed.has(run.length) ? -1 : this.text.indexOf(run, start);
    while (end >= 0 && this.text[end + run.length] === "`") {
      let next = end + run.length;
      while (this.text[next] === "`") next += 1;
      end = this.text.indexOf(run, next);
    }
    if (end < 0) {
      this.unclosed.add(run.length);
      return this.take([run], run);
    }
    const inside = this.text.slice(start, end).replaceAll("\n", " ");
    const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
    this.put(element("code", "", padded ? inside.slice(1, -1) : inside));
    this.at = end + run.length;
    return true;
  }

  link() {
    const found = !this.insideLink && this.match(LINK);
    const url = found && safeUrl(found[2]);
    return url && this.take(found, anchor(url, inlineNodes(found[1] || found[2], true)));
  }

  bareUrl() {
    const before = this.text[this.at - 1] ?? " ";
    const found = !this.insideLink && !/[\w]/.test(before) && this.match(URL_TEXT);
    if (!found) return false;
    const bracketed = found[0].startsWith("<") && found[0].endsWith(">");
    const shown = bracketed ? found[1] : trimmed(found[1]);
    const url = safeUrl(shown);
    if (!url) return false;
    if (!bracketed && found[0].startsWith("<")) this.put("<");
    const length = bracketed ? found[0].length : shown.length + (found[0].startsWith("<") ? 1 : 0);
    this.put(anchor(url, [shown]));
    this.at += length;
    return true;
  }

  marks() {
    const run = this.match(MARK)?.[0];
    if (!run) return false;
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + run.length] ?? " ";
    const isUnderscore = run[0] === "_"; // underscores within words are not emphasis
    const canClose = !/\s/.test(before) && !(isUnderscore && /\w/.test(after));
    const canOpen = !/\s/.test(after) && !(isUnderscore && /\w/.test(before));
    const marks = run.length === 3 ? [run.slice(0, 2), run[0]] : [run];
    if (canClose && this.close(marks)) {
      this.at += run.length;
      return true;
    }
    if (!canOpen || this.frames.length + marks.length > MAX_DEPTH) return this.take([run], run);
    for (const mark of marks) this.frames.push({ mark, children: [] });
    this.at += run.length;
    return true;
  }

  /** Close the emphases of these marks, the inner one first; return whether all were open. */
  close(marks) {
    const open = this.frames.map((frame) => frame.mark);
    if (!marks.every((mark) => open.includes(mark))) return false;
    const levels = marks.map((mark) => open.lastIndexOf(mark)).sort((a, b) => b - a);
    for (const level of levels) {
      this.dropTo(level + 1);
      const { mark, children } = this.frames.pop();
      this.put(children.length ? element(TAGS[mark], "", children) : mark + mark);
    }
    return true;
  }

  /** Turn emphases above a level that were never closed back into plain text. */
  dropTo(level) {
    while (this.frames.length > level) {
      const { mark, children } = this.frames.pop();
      for (const node of [mark, ...children]) this.put(node);
    }
  }

  plain() {
    const found = this.match(PLAIN);
    return this.take(found, found[0] === "\n" ? element("br") : found[0]);
  }
}

/** Return a URL in running text without the punctuation of the sentence after it. */
function trimmed(url) {
  let end = url.length;
  while (end > 0 && /[.,:;!?]/.test(url[end - 1])) end -= 1;
  if (url[end - 1] === ")" && !url.includes("(")) end -= 1;
  return url.slice(0, end);
}
