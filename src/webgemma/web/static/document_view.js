// The dialog that shows a document, with one passage of it marked.

import { byId, element } from "./dom.js";
import { t } from "./language.js";
import { PAGE_END } from "./document_text.js";

const BLOCK_LINES = 40; // of a text without pages; the browser lays out only those blocks that are in view

/** Return the blocks of a document: {begin, end, label}. */
function blocksOf(text, hasPages) {
  const blocks = [];
  let begin = 0;
  for (let number = 1; begin <= text.length; number += 1) {
    let end = begin;
    if (hasPages) end = text.indexOf(PAGE_END, begin);
    else for (let line = 0; line < BLOCK_LINES && end >= 0; line += 1) end = text.indexOf("\n", line ? end + 1 : begin);
    if (end < 0) end = text.length;
    blocks.push({ begin, end, label: hasPages ? t("Page {number}", { number }) : String(1 + BLOCK_LINES * (number - 1)) });
    begin = end + 1;
  }
  return blocks;
}

/** Return the nodes of a block's text, in which the passage is marked. */
function marked(text, { begin, end }, passage) {
  const from = Math.max(begin, passage?.begin ?? end);
  const to = Math.min(end, passage?.end ?? begin);
  if (from >= to) return [text.slice(begin, end)];
  return [text.slice(begin, from), element("mark", "", text.slice(from, to)), text.slice(to, end)];
}

/**
 * Show a document; `passage`: {begin, end}, the part of the text that is marked and in view; `facts`: what is said of
 * it below its name.
 */
export function showDocument({ name, text, pages }, { passage = null, facts = "" } = {}) {
  const dialog = byId("document-dialog");
  byId("document-title").textContent = name;
  byId("document-facts").textContent = facts;
  const blocks = blocksOf(text, Boolean(pages)).map((block) => {
    const label = element("span", "label", block.label);
    const body = element("pre", "", marked(text, block, passage));
    body.dir = "auto";
    return element("div", pages ? "page" : "lines", label, body);
  });
  const area = byId("document-text");
  area.replaceChildren(...blocks);
  if (!dialog.open) dialog.showModal();
  area.scrollTop = 0;
  const mark = area.querySelector("mark");
  if (!mark) return;
  mark.tabIndex = -1;
  mark.focus({ preventScroll: true });
  mark.scrollIntoView({ block: "center" });
  requestAnimationFrame(() => mark.scrollIntoView({ block: "center" })); // the blocks above have their heights now
}
