// A block of code with its language, a button to copy it, and colours.

import { element } from "./dom.js";
import { coloured } from "./highlighting.js";
import { t } from "./language.js";
import { soonAfter } from "./later.js";

const PAUSES = 3; // code that grows is coloured again after this many times as long as it took

/** A block of code that may grow; `figure` is its element. */
export class CodeBlock {
  constructor(language) {
    const copy = element("button", "quiet", t("Copy code"));
    copy.type = "button";
    copy.dataset.copy = "code"; // messages.js handles the click
    this.language = language;
    this.text = "";
    this.code = element("code");
    const block = element("pre", "", this.code);
    block.tabIndex = 0; // scrollable by keyboard
    block.dir = "ltr";
    block.setAttribute("aria-label", language ? t("Code, {language}", { language }) : t("Code"));
    block.setAttribute("role", "group");
    this.figure = element("figure", "code", element("figcaption", "", element("span", "", language || t("code")), copy), block);
    this.tail = null; // the text that has no colours yet
    this.isShown = true;
    this.isColoured = false; // completely
    this.isWaiting = false; // for its colours
    this.isGrowing = false;
    this.nextTime = 0; // at which code that grows is coloured again
    this.timer = 0;
  }

  show(text, isGrowing) {
    if (text !== this.text) {
      if (this.text && text.startsWith(this.text)) this.append(text.slice(this.text.length));
      else this.fill(document.createTextNode(text));
      this.text = text;
      this.isColoured = false;
    }
    if (this.isColoured) return;
    this.isGrowing = isGrowing;
    this.colour();
  }

  append(text) {
    if (!this.tail) this.code.append(this.tail = document.createTextNode(""));
    this.tail.appendData(text);
  }

  fill(nodes) {
    this.code.replaceChildren(nodes);
    this.tail = null;
  }

  colour() {
    if (!this.isShown || this.isColoured || this.isWaiting) return;
    const start = performance.now();
    if (this.isGrowing && start < this.nextTime) {
      this.timer ||= setTimeout(() => {
        this.timer = 0;
        this.colour();
      }, this.nextTime - start);
      return;
    }
    const { text } = this;
    const nodes = coloured(text, this.language);
    if (nodes instanceof Promise) {
      this.isWaiting = true;
      soonAfter(nodes, (found) => {
        this.isWaiting = false;
        this.put(text, found);
        this.nextTime = performance.now() + PAUSES * (performance.now() - start);
        if (!this.isColoured) this.colour();
      });
    } else this.put(text, nodes);
  }

  /** Show the colours of a text, from which the code may have grown. */
  put(text, nodes) {
    if (!this.text.startsWith(text)) return;
    if (nodes || this.code.childElementCount) {
      this.fill(nodes ?? document.createTextNode(text));
      if (text.length < this.text.length) this.append(this.text.slice(text.length));
    }
    this.isColoured = text === this.text;
  }

  /** The block has been removed. */
  drop() {
    this.isShown = false;
    clearTimeout(this.timer);
  }
}
