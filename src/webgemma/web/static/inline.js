// Markdown within a line: emphasis, code, links. Builds nodes only, in time linear in the text.

import { element } from "./dom.js";

const TAGS = { "*": "em", "_": "em", "**": "strong", "__": "strong", "~~": "del" };
const DEPTH_LIMIT = 12; // of emphasis in emphasis
const PROTOCOLS = ["http:", "https:", "mailto:"];

const LINK = /!?\[([^[\]]*)\]\(\s*<?((?:[^\s()<>]|\([^\s()<>]*\))+)>?(?:\s+"[^"]*")?\s*\)/y;
const ADDRESS = /<?((?:https?:\/\/|mailto:)[^\s<>"'`|*]+)>?/y;
const MARK = /\*{1,3}|_{1,3}|~~/y;
const PLAIN = /[^\\`![<*_~hm\n]+|[\s\S]/y;

/** The address if it may be followed, else null; a relative one is none. */
export function safeAddress(text) {
  try {
    const url = new URL(text);
    return PROTOCOLS.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function anchor(address, children) {
  const link = element("a", "", children);
  link.href = address;
  link.title = address; // the text of a link may pretend to be another address
  link.rel = "noopener noreferrer";
  link.target = "_blank";
  return link;
}

/** The nodes of a text within a block. */
export function inlineNodes(text, insideLink = false) {
  return new Line(text, insideLink).nodes();
}

/** One reading of a text: `frames` are the emphases that are open, the text itself the lowest. */
class Line {
  constructor(text, insideLink) {
    this.text = text;
    this.insideLink = insideLink;
    this.at = 0;
    this.frames = [{ mark: "", children: [] }];
    this.unclosed = new Set(); // lengths of backtick runs that do not come again
  }

  nodes() {
    while (this.at < this.text.length) {
      this.escape() || this.code() || this.link() || this.address() || this.marks() || this.plain();
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
    const address = found && safeAddress(found[2]);
    return address && this.take(found, anchor(address, inlineNodes(found[1] || found[2], true)));
  }

  address() {
    const before = this.text[this.at - 1] ?? " ";
    const found = !this.insideLink && !/[\w]/.test(before) && this.match(ADDRESS);
    if (!found) return false;
    const bracketed = found[0].startsWith("<") && found[0].endsWith(">");
    const shown = bracketed ? found[1] : trimmed(found[1]);
    const address = safeAddress(shown);
    if (!address) return false;
    if (!bracketed && found[0].startsWith("<")) this.put("<");
    const length = bracketed ? found[0].length : shown.length + (found[0].startsWith("<") ? 1 : 0);
    this.put(anchor(address, [shown]));
    this.at += length;
    return true;
  }

  marks() {
    const run = this.match(MARK)?.[0];
    if (!run) return false;
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + run.length] ?? " ";
    const word = run[0] === "_"; // underscores in names are no emphasis
    const canClose = !/\s/.test(before) && !(word && /\w/.test(after));
    const canOpen = !/\s/.test(after) && !(word && /\w/.test(before));
    const parts = run.length === 3 ? [run.slice(0, 2), run[0]] : [run];
    if (canClose && this.close(parts)) {
      this.at += run.length;
      return true;
    }
    if (!canOpen || this.frames.length + parts.length > DEPTH_LIMIT) return this.take([run], run);
    for (const mark of parts) this.frames.push({ mark, children: [] });
    this.at += run.length;
    return true;
  }

  /** Close the emphases of these marks, the inner one first; whether all were open. */
  close(parts) {
    const open = this.frames.map((frame) => frame.mark);
    if (!parts.every((mark) => open.includes(mark))) return false;
    const levels = parts.map((mark) => open.lastIndexOf(mark)).sort((a, b) => b - a);
    for (const level of levels) {
      this.dropTo(level + 1);
      const { mark, children } = this.frames.pop();
      this.put(children.length ? element(TAGS[mark], "", children) : mark + mark);
    }
    return true;
  }

  /** Emphases above a level that were never closed become the text they were. */
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

/** An address in running text ends before the sentence's own punctuation. */
function trimmed(address) {
  let end = address.length;
  while (end > 0 && /[.,:;!?]/.test(address[end - 1])) end -= 1;
  if (address[end - 1] === ")" && !address.includes("(")) end -= 1;
  return address.slice(0, end);
}
