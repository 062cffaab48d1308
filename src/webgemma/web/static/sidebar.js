// The list of conversations, and on a phone the drawer it lives in.

import { byId, button, element } from "./dom.js";
import { askLine, confirmed } from "./question.js";

/** `acts` has open(id), rename(id, title) and remove(id). */
export class Sidebar {
  constructor(acts) {
    this.acts = acts;
    byId("sidebar-open").addEventListener("click", () => this.drawer(true));
    byId("sidebar-close").addEventListener("click", () => this.drawer(false));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.drawer(false);
    });
    // The room behind an open drawer is inert, so that a click beside the drawer lands on the page.
    document.addEventListener("click", (event) => {
      if (this.isOpen && !event.target.closest("#sidebar, dialog")) this.drawer(false);
    }, { capture: true });
    matchMedia("(min-width: 48.01rem)").addEventListener("change", () => this.drawer(false));
  }

  get isOpen() {
    return byId("sidebar").classList.contains("open");
  }

  drawer(open) {
    if (open === this.isOpen) return;
    byId("sidebar").classList.toggle("open", open);
    byId("room").inert = open;
    byId(open ? "sidebar-close" : "sidebar-open").focus();
  }

  show(conversations, currentId) {
    byId("conversations").replaceChildren(...conversations.map((conversation) =>
      this.item(conversation, conversation.id === currentId)));
  }

  item({ id, title }, isCurrent) {
    const open = button(title, "conversation", () => {
      this.drawer(false);
      this.acts.open(id);
    });
    open.title = title;
    const item = element("li", isCurrent ? "current" : "", open);
    if (!isCurrent) return item;
    open.setAttribute("aria-current", "true");
    const rename = button("Rename", "quiet", async () => {
      const line = (await askLine("A new title for this conversation", "Rename", title))?.trim();
      if (line) this.acts.rename(id, line);
    });
    const remove = button("Delete", "quiet", async () => {
      if (await confirmed(`Delete “${title}”? It cannot be brought back.`, "Delete")) this.acts.remove(id);
    });
    item.append(element("div", "row", rename, remove));
    return item;
  }
}
