// Tokens of Markdown to nodes of the page, never through HTML: only what is listed here can come from a text.

import { CodeBlock } from "./code_block.js";
import { element } from "./dom.js";
import { t } from "./language.js";
import { soon, soonAfter } from "./later.js";
import { codeOf } from "./markdown_blocks.js";
import { formula, hasMath, isKept, loadMath } from "./math.js";
import { isDisplay, texOf } from "./math_syntax.js";

const TAGS = [
  "blockquote", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "strong", "sub", "sup", "tbody", "td", "th",
  "thead", "tr", "ul",
];
const ALIGNMENTS = { center: "middle", right: "end" };
const MAX_NAME = 80; // characters of a task's name

/** One block: `nodes` of its tokens, and what is still to come while it is shown. */
export class Block {
  /** `scope` makes the names of its footnotes its message's own; `level` is that of the heading before it. */
  constructor(tokens, scope, level) {
    this.scope = scope;
    this.level = level;
    this.code = []; // blocks of code within it
    this.tasks = [];
    this.isShown = true;
    const fragment = document.createDocumentFragment();
    this.append(tokens, fragment);
    for (const task of this.tasks) nameTask(task);
    for (const node of fragment.children) node.dir ||= "auto";
    this.nodes = [...fragment.childNodes];
  }

  /** The block has been removed. */
  drop() {
    this.isShown = false;
    for (const code of this.code) code.drop();
  }

  append(tokens, node) {
    const open = [node];
    for (const token of tokens) {
      const top = open.at(-1);
      if (token.hidden) continue; // paragraphs of a list without empty lines
      if (token.nesting < 0) open.length > 1 && open.pop();
      else if (token.type === "inline") this.append(token.children, top);
      else {
        const { outer, inner } = this.element(token);
        top.append(outer);
        if (token.nesting > 0) open.push(inner);
      }
    }
  }

  /** Return the node of a token, and the one that what it contains goes into. */
  element(token) {
    const outer = this[token.type]?.(token) ?? this.plain(token);
    return { outer, inner: outer.querySelector?.("table, ol") ?? outer };
  }

  plain({ tag, content }) {
    return TAGS.includes(tag) ? element(tag) : content;
  }

  text({ content }) {
    return content;
  }

  text_special({ content }) {
    return content;
  }

  softbreak() {
    return element("br");
  }

  hardbreak() {
    return element("br");
  }

  code_inline({ content }) {
    const node = element("code", "", content);
    node.dir = "ltr";
    return node;
  }

  /** A heading is at most one level below the one before: a reply may begin with ###. */
  heading_open({ tag }) {
    const node = element(tag);
    const level = Number(tag[1]);
    this.level = Math.min(level, this.level + 1);
    if (this.level < level) node.ariaLevel = this.level;
    return node;
  }

  ordered_list_open(token) {
    const node = element("ol");
    const start = token.attrGet("start");
    if (start !== null) node.start = start;
    return node;
  }

  list_item_open({ meta }) {
    return element("li", meta?.isTask ? "task" : "");
  }

  task({ meta }) {
    const box = element("input");
    box.type = "checkbox";
    box.disabled = true;
    box.toggleAttribute("checked", meta.isDone);
    this.tasks.push(box);
    return box;
  }

  link_open(token) {
    const link = element("a", token.markup ? "bare" : ""); // its text is the URL
    link.href = token.attrGet("href"); // absolute, of an allowed protocol: see markdown_blocks.js
    link.title = link.href; // its text may look like another URL
    link.rel = "noopener noreferrer";
    link.target = "_blank";
    return link;
  }

  table_open() {
    const box = element("div", "table", element("table"));
    box.tabIndex = 0; // scrollable by keyboard
    box.role = "group";
    box.ariaLabel = t("Table");
    return box;
  }

  th_open({ meta }) {
    return element("th", ALIGNMENTS[meta.align] ?? "");
  }

  td_open({ meta }) {
    return element("td", ALIGNMENTS[meta.align] ?? "");
  }

  fence(token) {
    const { code, language } = codeOf(token);
    const block = new CodeBlock(language);
    this.code.push(block);
    block.show(code, false);
    return block.figure;
  }

  code_block(token) {
    return this.fence(token);
  }

  // Formulas: their source until they are made

  math(node, source) {
    const tex = texOf(source);
    const isOnItsOwn = isDisplay(source);
    node.dir = "ltr";
    const put = () => {
      const made = this.isShown && formula(tex, isOnItsOwn);
      if (made) node.replaceChildren(made);
      else node.classList.replace("math", "formula-source");
    };
    if (!hasMath()) soonAfter(loadMath(), put);
    else if (isKept(tex, isOnItsOwn)) put();
    else soon(put);
    return node;
  }

  math_inline({ content }) {
    return this.math(element("span", isDisplay(content) ? "math display" : "math", content), content);
  }

  math_block({ content }) {
    return this.math(element("div", "math display", content), content);
  }

  math_growing({ content }) {
    const node = element("div", "formula-source", content);
    node.dir = "ltr";
    return node;
  }

  // Footnotes: their names begin with the scope, so that a link stays in its message

  footnote_ref({ meta: { id, subId } }) {
    const link = element("a", "", String(id + 1));
    link.id = `reference-${this.scope}-${id + 1}-${subId}`;
    link.setAttribute("href", `#note-${this.scope}-${id + 1}`);
    link.ariaLabel = t("Footnote {number}", { number: id + 1 });
    return element("sup", "", link);
  }

  footnote_block_open() {
    const section = element("section", "footnotes", element("ol"));
    section.ariaLabel = t("Footnotes");
    return section;
  }

  footnote_open({ meta: { id } }) {
    const item = element("li");
    item.id = `note-${this.scope}-${id + 1}`;
    return item;
  }

  footnote_anchor({ meta: { id, subId } }) {
    const link = element("a", "back", "↩\uFE0E");
    link.setAttribute("href", `#reference-${this.scope}-${id + 1}-${subId}`);
    link.ariaLabel = t("Back to the text of footnote {number}", { number: id + 1 });
    return link;
  }
}

/** Give a check box the text of its item as its name. */
function nameTask(box) {
  const item = box.closest("li").cloneNode(true);
  for (const inner of item.querySelectorAll("ul, ol, figure")) inner.remove();
  box.ariaLabel = item.textContent.trim().slice(0, MAX_NAME) || t("Task");
}
