// Markdown of a model as nodes of the page. Blocks of a growing text that are complete are not read again.

import { CodeBlock } from "./code_block.js";
import { element } from "./dom.js";

// Without its libraries (a checkout without `npm ci`), the page shows plain text.
const library = await Promise.all([import("./markdown_blocks.js"), import("./markdown_nodes.js")])
  .then(([blocks, nodes]) => ({ ...blocks, ...nodes }), () => null);

const MAX_LENGTH = 2e6; // longer texts are plain
const MESSAGE_LEVEL = 3; // of the heading of a message
const SLOW_MILLISECONDS = 10; // after which a growing text is shown less often,
const PAUSES = 5; // with breaks of this many times as long as showing took
const DEFINITION = /^[ \t>*+\-\d.)]*\[[^\n]+\]:/m; // of a link or a footnote, which may change any block
const INCOMPLETE = /\n[ \t]*(?:[-=*+]+|\d+[.)]?)[ \t]*$/y; // a last line that may become an item or a heading

const renderings = new WeakMap(); // by container
let scopes = 0;

/** Show `text` in `container`; blocks that are unchanged keep their nodes. A growing text may be shown a little later. */
export function showMarkdown(container, text, { isGrowing = false } = {}) {
  let rendering = renderings.get(container);
  if (!(rendering instanceof Rendering)) {
    rendering = new Rendering(container);
    renderings.set(container, rendering);
  }
  rendering.show(text, isGrowing);
}

/** Show `text` in `container` as one block of code; the block stays while the text grows. */
export function showCode(container, text, language, { isGrowing = false } = {}) {
  let code = renderings.get(container);
  if (!(code instanceof CodeBlock)) {
    code = new CodeBlock(language);
    renderings.set(container, code);
    container.replaceChildren(code.figure);
  }
  code.show(text, isGrowing);
}

/** The blocks of one container. */
class Rendering {
  constructor(container) {
    this.container = container;
    container.replaceChildren();
    this.blocks = []; // what shows them: each with `nodes`, `level` of the last heading, and drop()
    this.keys = [];
    this.text = null;
    this.isGrowing = false;
    this.reset();
    this.scope = scopes += 1; // of the names of its footnotes
    this.nextTime = 0;
    this.timer = 0;
  }

  reset() {
    this.settled = 0; // so many blocks at the beginning do not change when the text grows
    this.settledLength = 0; // of their text
    this.hasDefinitions = false;
  }

  show(text, isGrowing) {
    if (text === this.text && isGrowing === this.isGrowing) return;
    clearTimeout(this.timer);
    const start = performance.now();
    if (isGrowing && start < this.nextTime) {
      this.timer = setTimeout(() => this.show(text, true), this.nextTime - start);
      return;
    }
    this.draw(text, isGrowing);
    const took = performance.now() - start;
    this.nextTime = took > SLOW_MILLISECONDS ? start + took + PAUSES * took : 0;
  }

  draw(given, isGrowing) {
    if (this.text === null || !given.startsWith(this.text)) this.reset();
    this.text = given;
    this.isGrowing = isGrowing;
    if (!library || given.length > MAX_LENGTH) {
      this.reset();
      return this.place([{ text: given }], isGrowing);
    }
    let text = given.replaceAll("\r\n", "\n").replaceAll("\r", "\n");
    if (isGrowing) {
      INCOMPLETE.lastIndex = Math.max(0, text.lastIndexOf("\n"));
      text = text.replace(INCOMPLETE, "");
    }
    if (!this.hasDefinitions && DEFINITION.test(text.slice(this.settledLength))) {
      this.reset();
      this.hasDefinitions = true;
    }
    const rest = text.slice(this.settledLength);
    const found = library.blocksOf(rest, isGrowing);
    this.place(found, isGrowing);
    if (isGrowing && !this.hasDefinitions) this.settle(found, rest);
  }

  /** Find the blocks that are complete: those before the last one of all complete lines. */
  settle(found, rest) {
    const line = library.openLine(rest.slice(0, rest.lastIndexOf("\n") + 1), true);
    if (!line) return;
    this.settled += found.filter((block) => block.line < line).length;
    let at = 0;
    for (let i = 0; i < line; i += 1) at = rest.indexOf("\n", at) + 1;
    this.settledLength += at;
  }

  /** Show these blocks after those that are settled. */
  place(found, isGrowing) {
    found.forEach((block, i) => {
      const index = this.settled + i;
      const key = block.tokens ? library.keyOf(block.tokens) : JSON.stringify([block.language, block.text]);
      if (this.keys[index] !== key) this.replace(index, key, this.made(block, index));
      if (block.code !== undefined) this.blocks[index].show(block.code, isGrowing && i === found.length - 1);
    });
    const count = this.settled + found.length;
    for (const block of this.blocks.splice(count)) this.remove(block);
    this.keys.length = count;
  }

  replace(index, key, block) {
    const old = this.blocks[index];
    if (old) {
      old.nodes[0].before(...block.nodes);
      this.remove(old);
    } else this.container.append(...block.nodes);
    this.blocks[index] = block;
    this.keys[index] = key;
  }

  remove(block) {
    block.drop();
    for (const node of block.nodes) node.remove();
  }

  /** Return what shows a block: a CodeBlock, a Block, or plain text. */
  made(block, index) {
    const level = this.blocks[index - 1]?.level ?? MESSAGE_LEVEL;
    if (block.text !== undefined) return { nodes: [element("div", "plain", block.text)], drop() {} };
    if (block.tokens) return new library.Block(block.tokens, this.scope, level);
    const code = new CodeBlock(block.language);
    return Object.assign(code, { nodes: [code.figure], level });
  }
}
