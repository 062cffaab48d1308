// Documents that are searched: their dialog, the switch at the message box, and what a reply is given of them.

import { Citations, placeIn } from "./citations.js";
import { humanSize, byId, button, element, namedButton } from "./dom.js";
import { sizeOf } from "./document_text.js";
import { showDocument } from "./document_view.js";
import { filesIn, isShown } from "./folders.js";
import { plural, t } from "./language.js";
import { Library } from "./library.js";
import { confirmed } from "./question.js";

const MAX_SHOWN = 200; // documents in the list; the others are counted
const BYTES_PER_TOKEN = 3; // at least, of most texts

/** Return as many of the passages, the best ones, as fit half of a context. */
function fitting(passages, context) {
  let room = (context ?? Infinity) * BYTES_PER_TOKEN / 2;
  return passages.filter(({ text }, at) => {
    room -= new Blob([text]).size;
    return at === 0 || room >= 0;
  });
}

/**
 * The documents of the page. `view` has conversation(), the one that is shown, path(), its messages, and context(), tokens
 * of the model or null. `embedder`: see library.js; it also has `element`, which the dialog shows, and refresh(), called
 * when that opens.
 */
export class Documents {
  constructor(embedder, view) {
    this.view = view;
    this.library = new Library(embedder);
    this.switches = new Map(); // by the id of a conversation: what was chosen since its last reply
    this.citations = new Citations((passage) => this.open(passage));
    this.dialog = byId("documents-dialog");
    this.library.addEventListener("change", () => this.showSoon());
    byId("documents-model").append(embedder.element);
    byId("documents-button").addEventListener("click", () => this.show());
    byId("documents-manage").addEventListener("click", () => this.show());
    byId("documents-switch").addEventListener("click", () => this.toggle());
    byId("documents-stop").addEventListener("click", () => this.library.stop());
    byId("documents-go-on").addEventListener("click", () => this.library.resume());
    byId("documents-delete").addEventListener("click", () => this.removeAll());
    for (const [choose, input] of [["documents-choose", "documents-files"], ["documents-choose-folder", "documents-folder"]]) {
      byId(choose).addEventListener("click", () => byId(input).click());
      byId(input).addEventListener("change", ({ target }) => {
        this.add(filesIn([], [...target.files].filter((file) => !file.webkitRelativePath || isShown(file))));
        target.value = ""; // the same files may be chosen again
      });
    }
  }

  // The switch

  /** Whether the next reply of a conversation is given passages: as the last one was, unless that was changed. */
  isOn(conversation, path = this.view.path()) {
    const last = path.findLast(({ role }) => role === "assistant");
    return this.library.byId.size > 0 && (this.switches.get(conversation.id) ?? Boolean(last?.passages));
  }

  toggle() {
    if (!this.library.byId.size) {
      this.show();
      return;
    }
    const conversation = this.view.conversation();
    this.switches.set(conversation.id, !this.isOn(conversation));
    this.showSwitch();
  }

  showSwitch() {
    const isOn = this.isOn(this.view.conversation());
    byId("documents-switch").ariaPressed = String(isOn);
    byId("documents-on").hidden = !isOn;
    const count = this.library.byId.size;
    byId("documents-on-text").textContent = plural(count, "The reply is given passages of {count} document.", "The reply is given passages of {count} documents.");
  }

  /** Find the passages for a reply to a message, if documents are on; else return null. */
  async passagesFor(conversation, question) {
    const isOn = this.isOn(conversation);
    if (!isOn || !question.trim()) return null;
    return fitting(await this.library.find(question), this.view.context());
  }

  // A document at a passage

  /** Show the document of a passage, marked, or the passage alone if the document is gone or has changed. */
  open(passage) {
    const document = this.library.get(passage.document);
    const { name, begin, end, text } = passage;
    if (document?.text.slice(begin, end) === text) showDocument(document, { passage: { begin, end }, facts: placeIn(passage) });
    else showDocument({ name, text }, { facts: t("This document was deleted or has changed: here is the passage as the model was given it.") });
  }

  // The dialog

  show() {
    if (!this.dialog.open) this.dialog.showModal();
    this.library.embedder.refresh();
    this.render();
  }

  /** Add files; a promise of them. The dialog shows what becomes of them. */
  async add(promised) {
    this.show();
    const files = await promised;
    if (!files.length) return;
    navigator.storage?.persist?.().catch(() => {}); // if refused, the browser may delete them when space is low
    const { added, unchanged, problems, remarks } = await this.library.add(files);
    const facts = [
      added.length ? plural(added.length, "{count} document was added.", "{count} documents were added.") : "",
      unchanged.length ? plural(unchanged.length, "{count} was there already, unchanged.", "{count} were there already, unchanged.") : "",
    ];
    byId("documents-outcome").textContent = facts.filter(Boolean).join(" ");
    byId("documents-problems").replaceChildren(...[...problems, ...remarks].map((text) => element("li", "", text)));
  }

  /** Show the current state, at most once a frame. */
  showSoon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.showSwitch();
      this.render();
    });
  }

  render() {
    if (!this.dialog.open) return;
    const { library } = this;
    const documents = library.list();
    this.renderProgress();
    const focused = document.activeElement?.closest("[data-key]")?.dataset.key;
    byId("documents-list").replaceChildren(...documents.slice(0, MAX_SHOWN).map((each) => this.item(each)));
    const rest = documents.length - MAX_SHOWN;
    byId("documents-rest").textContent = rest > 0 ? plural(rest, "and {count} more", "and {count} more") : "";
    if (focused && !this.dialog.contains(document.activeElement)) {
      ([...this.dialog.querySelectorAll("[data-key]")].find(({ dataset }) => dataset.key === focused) ?? byId("documents-title")).focus();
    }
    byId("documents-empty").hidden = documents.length > 0;
    byId("documents-delete").hidden = documents.length === 0;
    const nbytes = documents.reduce((sum, { text }) => sum + text.length, 0);
    const passages = documents.reduce((sum, { cuts }) => sum + cuts.length, 0);
    byId("documents-total").textContent = documents.length
      ? t("{documents}, {passages}, {size}", {
        documents: plural(documents.length, "{count} document", "{count} documents"),
        passages: plural(passages, "{count} passage", "{count} passages"),
        size: humanSize(nbytes),
      }) : "";
    const isMissing = library.embedder.fingerprint !== null && documents.some((each) => !library.isEmbedded(each));
    byId("documents-go-on").hidden = !isMissing || library.progress !== null;
    byId("documents-problem").textContent = library.problem;
  }

  renderProgress() {
    const { progress } = this.library;
    byId("documents-progress").hidden = progress === null;
    if (!progress) return;
    const { stage, done, total, name } = progress;
    byId("documents-progress-text").textContent = stage === "reading" ? t("Reading {name} …", { name }) : t("Embedding {name}: {done} of {total} passages", { name, done, total });
    Object.assign(byId("documents-bar"), { max: total, value: done });
  }

  item(each) {
    const open = button(each.name, "quiet name", () => showDocument(each, { facts: sizeOf(each) }));
    open.title = t("Show {name}", each);
    const remove = namedButton(t("Delete"), t("Delete {name}", each), "quiet", () => this.remove([each.id]));
    [open, remove].forEach((control, at) => { control.dataset.key = `${each.id} ${at}`; });
    const state = this.library.embedder.fingerprint !== null && !this.library.isEmbedded(each) ? ` · ${t("not embedded yet")}` : "";
    return element("li", "", open, element("span", "facts", sizeOf(each) + state), remove);
  }

  async removeAll() {
    const count = this.library.byId.size;
    if (await confirmed(plural(count, "Delete {count} document from this browser?", "Delete {count} documents from this browser?"), t("Delete"))) this.remove([...this.library.byId.keys()]);
  }

  async remove(ids) {
    try {
      await this.library.remove(ids);
    } catch (error) {
      byId("documents-problem").textContent = t("The documents could not be deleted ({error}).", { error: error.message });
    }
  }
}
