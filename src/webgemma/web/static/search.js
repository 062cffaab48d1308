// Search over conversations: in their titles, messages and the names of attached files. Every word has to occur, the
// latest conversations come first, and results appear while it goes on.

import { byId, element } from "./dom.js";
import { fold, haveAll, isAscii, rangesOf, wordsOf } from "./fold.js";
import { plural, t } from "./language.js";
import { titleElement } from "./sidebar.js";

const MOST_RESULTS = 100;
const MOST_OF_A_CONVERSATION = 3; // messages that are shown
const SLICE_MILLISECONDS = 10; // of searching between two chances for the page to respond
const SNIPPET_BEFORE = 30; // characters before the first match
const SNIPPET_LENGTH = 160;
const HALVES = /^[\udc00-\udfff]|[\ud800-\udbff]$/g; // of characters that were cut

const remembered = new WeakMap(); // by message: {text, folded}

/** Return what is searched of a message. */
const textOf = ({ content, attachments = [] }) => [content, ...attachments.map(({ name }) => name)].join("\n");

/** Return the folded text of a message: folding ASCII is fast, the rest is remembered. */
function foldedText(message) {
  const text = textOf(message);
  if (isAscii(text)) return fold(text);
  if (remembered.get(message)?.text !== text) remembered.set(message, { text, folded: fold(text) });
  return remembered.get(message).folded;
}

/** Return the messages of a conversation in which all words occur that its title does not have, the latest first. */
function matchesIn({ title, messages }, words) {
  const foldedTitle = fold(title);
  const missing = words.filter((word) => !foldedTitle.includes(word));
  // If the title has them all, so has the message that it was made from.
  const candidates = [...messages.values()].filter(({ parent }) => missing.length || parent !== null);
  const found = candidates.filter((message) => haveAll([foldedText(message)], missing.length ? missing : words));
  return found.sort((a, b) => b.created - a.created).slice(0, MOST_OF_A_CONVERSATION);
}

/** Return a text with its matches marked. */
function marked(text, ranges) {
  const parts = [];
  let at = 0;
  for (const [start, end] of ranges) {
    parts.push(text.slice(at, start), element("mark", "", text.slice(start, end)));
    at = end;
  }
  return [...parts, text.slice(at)].filter((part) => part !== "");
}

/** Return the part of a text around its first match, marked. */
function snippet(text, words) {
  const first = rangesOf(text, words)[0]?.[0] ?? 0;
  const near = Math.max(0, first - SNIPPET_BEFORE);
  const space = text.indexOf(" ", near);
  const start = near && space >= 0 && space < first ? space + 1 : near; // of a word, where there are spaces
  const part = text.slice(start, start + SNIPPET_LENGTH).replace(/\s/g, " ").replace(HALVES, "");
  return [start ? "… " : "", ...marked(part, rangesOf(part, words))];
}

/** The search box and its results. `actions` has open(conversation, message or null, words), and leave(). */
export class Search {
  constructor(conversations, actions) {
    this.conversations = conversations;
    this.actions = actions;
    this.box = byId("search");
    this.list = byId("results");
    this.latest = 0; // the number of the latest search: earlier ones end
    this.box.addEventListener("input", () => this.run());
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    this.list.addEventListener("keydown", (event) => this.onKey(event));
  }

  get results() {
    return [...this.list.querySelectorAll("button")];
  }

  /** Show the results instead of the list of conversations, or that again. */
  async run() {
    this.latest += 1;
    const number = this.latest;
    const words = wordsOf(this.box.value);
    const isSearching = words.length > 0;
    byId("search-area").hidden = !isSearching;
    byId("conversations").hidden = isSearching;
    byId("search-state").textContent = "";
    if (!isSearching) {
      this.list.replaceChildren();
      return;
    }
    let isFirst = true;
    let count = 0;
    for await (const found of this.find(words, () => number !== this.latest)) {
      if (number !== this.latest) return;
      if (isFirst) this.list.replaceChildren(); // until then those of the search before
      isFirst = false;
      count += found.length;
      this.list.append(...found.map((result) => this.item(result, words)));
    }
    if (number !== this.latest) return;
    if (isFirst) this.list.replaceChildren();
    byId("search-state").textContent = count < MOST_RESULTS
      ? plural(count, "{count} result", "{count} results")
      : plural(count, "The latest result", "The latest {count} results");
  }

  /** Yield lists of results {conversation, message or null}, until there are enough of them. */
  async* find(words, isOver) {
    let left = MOST_RESULTS;
    let found = [];
    let sliceEnd = performance.now() + SLICE_MILLISECONDS;
    const conversations = this.conversations.list();
    const titles = conversations.filter(({ title }) => haveAll([fold(title)], words));
    found.push(...titles.slice(0, left).map((conversation) => ({ conversation, message: null })));
    left -= found.length;
    for (const conversation of conversations) {
      if (left <= 0) break;
      await this.conversations.complete(conversation).catch(() => {}); // what cannot be read is not searched
      const messages = matchesIn(conversation, words).slice(0, left);
      left -= messages.length;
      found.push(...messages.map((message) => ({ conversation, message })));
      if (performance.now() < sliceEnd) continue;
      if (found.length) yield found;
      found = [];
      await new Promise((resolve) => { setTimeout(resolve); });
      if (isOver()) return;
      sliceEnd = performance.now() + SLICE_MILLISECONDS;
    }
    if (found.length) yield found;
  }

  item({ conversation, message }, words) {
    const open = element("button", "conversation", titleElement(marked(conversation.title, rangesOf(conversation.title, words))));
    open.type = "button";
    if (message) {
      const text = element("span", "snippet", snippet(textOf(message), words));
      text.dir = "auto";
      open.append(text);
    }
    open.addEventListener("click", () => this.actions.open(conversation, message, words));
    return element("li", "", open);
  }

  clear() {
    this.box.value = "";
    this.run();
  }

  onKey(event) {
    const { key } = event;
    if (event.isComposing) return;
    if (key === "Escape" && this.box.value) {
      this.clear();
      this.box.focus();
    } else if (key === "Escape" && event.target === this.box && this.actions.leave()) {
      // and not further
    } else if (key === "Enter" && event.target === this.box) this.results[0]?.click();
    else if (["ArrowDown", "ArrowUp"].includes(key)) this.move(key === "ArrowDown" ? 1 : -1, event.target);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Move from the box to the results and back. */
  move(step, from) {
    const places = [this.box, ...this.results];
    places[places.indexOf(from) + step]?.focus();
  }
}

/** Mark words in a message that is shown, where the browser can, and the message itself. */
export function reveal(node, words) {
  for (const other of document.querySelectorAll(".found")) other.classList.remove("found");
  node.classList.add("found");
  if (globalThis.Highlight) CSS.highlights.set("found", new Highlight(...wordRanges(node, words)));
  node.scrollIntoView({ block: "center" });
}

function wordRanges(node, words) {
  const ranges = [];
  const walker = document.createTreeWalker(node.querySelector(".body") ?? node, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    for (const [start, end] of rangesOf(text.data, words)) {
      ranges.push(new StaticRange({ startContainer: text, startOffset: start, endContainer: text, endOffset: end }));
    }
  }
  return ranges;
}

/** Take the marks of `reveal` away. */
export function conceal() {
  for (const node of document.querySelectorAll(".found")) node.classList.remove("found");
  CSS.highlights?.delete("found");
}
