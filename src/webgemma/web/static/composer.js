// The box one writes in: Enter sends, Shift+Enter is a new line, Escape stops the reply.

import { byId } from "./dom.js";

/** `acts` has send(text), true if it was sent, and stop(). `hasMore()`: there is more than text to send. */
export class Composer {
  constructor(acts, hasMore) {
    this.acts = acts;
    this.hasMore = hasMore;
    this.box = byId("prompt");
    this.box.addEventListener("input", () => this.fit());
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", acts.stop);
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) acts.stop();
    });
  }

  /** Whether a reply is in progress (Stop), and whether one could begin (Send). */
  show(isReplying, canSend) {
    const stop = byId("stop");
    const hadFocus = document.activeElement === stop;
    byId("send").hidden = isReplying;
    stop.hidden = !isReplying;
    byId("send").disabled = !canSend;
    if (hadFocus && !isReplying) this.focus();
  }

  /** Where there is a keyboard; on a phone it would come up and hide half of the page. */
  focus() {
    if (matchMedia("(pointer: fine)").matches) this.box.focus();
  }

  send() {
    const text = this.box.value.trim();
    if (!(text || this.hasMore()) || !this.acts.send(text)) return;
    this.box.value = "";
    this.fit();
  }

  /** As high as its text; the style sheet sets the most. */
  fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight + 2}px`;
  }
}
