// The message box, and the attachments that will be sent with the next message.

import { attach, attachmentList, kindOf } from "./attachments.js";
import { byId } from "./dom.js";
import { t } from "./language.js";

/**
 * The message box: Enter sends, Shift+Enter starts a new line, Escape stops the reply. `actions` has
 * send(text), which returns whether it was sent, stop(), and typed(text). `hasAttachments()` allows an empty text.
 */
export class Composer {
  constructor(actions, hasAttachments) {
    this.actions = actions;
    this.hasAttachments = hasAttachments;
    this.box = byId("prompt");
    this.box.addEventListener("input", () => {
      this.fit();
      actions.typed(this.box.value);
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", actions.stop);
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) actions.stop();
    });
  }

  /** Show Stop while a reply is in progress, else Send, which is enabled if a message can be sent. */
  show(isReplying, canSend) {
    const stop = byId("stop");
    const hadFocus = document.activeElement === stop;
    byId("send").hidden = isReplying;
    stop.hidden = !isReplying;
    byId("send").disabled = !canSend;
    if (hadFocus && !isReplying) this.focus();
  }

  /** Focus the box, but not on touch screens, where the keyboard would cover half of the page. */
  focus() {
    if (matchMedia("(pointer: fine)").matches) this.box.focus();
  }

  send() {
    const text = this.box.value.trim();
    if (!(text || this.hasAttachments()) || !this.actions.send(text)) return;
    this.fill("");
    this.actions.typed("");
  }

  /** Show a text in the box. */
  fill(text) {
    this.box.value = text;
    this.fit();
  }

  /** Make the box as high as its text; the style sheet sets the maximum. */
  fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight + 2}px`;
  }
}

/**
 * The attachments of the next message: chosen, pasted, dropped or recorded. They are in `draft`, which belongs to a
 * conversation. Calls `changed(draft)` when they change, `shown()` when they are shown, and `notify(message)` when a
 * file cannot be attached or was read in a way that the user should know. `context()`: tokens of the model, or null.
 */
export class Tray {
  constructor({ changed, shown, notify, context }) {
    this.changed = changed;
    this.context = context;
    this.shown = shown;
    this.notify = notify;
    this.draft = { attachments: [] };
    this.decoding = 0; // calls of `add` in progress
    const input = byId("attach-file");
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.add([...input.files]);
      input.value = ""; // the same file may be chosen again
    });
    document.addEventListener("paste", (event) => this.paste(event));
  }

  /** Attach pasted files; text that comes with an image of itself, as from a spreadsheet, is pasted as text. */
  paste(event) {
    const files = [...event.clipboardData.files].filter(kindOf);
    const isElsewhere = document.querySelector("dialog[open]") || event.target.closest?.(".edit");
    if (!files.length || isElsewhere || event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    this.add(files);
  }

  /** Show the attachments of a draft. */
  open(draft) {
    this.draft = draft;
    this.show();
  }

  get attachments() {
    return this.draft.attachments;
  }

  /** Attach those of the files that can be read, in their order. */
  async add(files) {
    const { draft } = this; // the conversation may be another one when they are decoded
    this.decoding += 1;
    this.show();
    const remarks = [];
    const results = await Promise.allSettled(files.map((file) => attach(file, this.context(), (message) => remarks.push(message))));
    this.decoding -= 1;
    const attached = results.filter(({ value }) => value).map(({ value }) => value);
    draft.attachments.push(...attached);
    this.changed(draft);
    this.show();
    byId("announcer").textContent = attached.length ? t("Attached: {names}", { names: attached.map(({ name }) => name).join(", ") }) : "";
    const problems = results.filter(({ reason }) => reason).map(({ reason }) => reason.message);
    if (problems.length + remarks.length) this.notify([...problems, ...remarks].join(" "));
  }

  /** Return the attachments and remove them from the tray. */
  take() {
    const { draft } = this;
    const { attachments } = draft;
    draft.attachments = [];
    this.changed(draft);
    this.show();
    return attachments;
  }

  show() {
    const { draft } = this;
    byId("tray").replaceChildren(...attachmentList(draft.attachments, (removed) => {
      draft.attachments = draft.attachments.filter((other) => other !== removed);
      this.changed(draft);
      this.show();
      byId("prompt").focus();
    }));
    byId("tray-state").textContent = this.decoding ? t("Reading …") : "";
    this.shown();
  }
}
