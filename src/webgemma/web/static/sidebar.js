// The sidebar with the list of conversations; on small screens it is a drawer.

import { byId, button, element } from "./dom.js";
import { askLine, confirmed } from "./question.js";

/** `actions` has open(id), rename(id, title) and remove(id). */
export class Sidebar {
  constructor(actions) {
    this.actions = actions;
    byId("sidebar-open").addEventListener("click", () => this.drawer(true));
    byId("sidebar-close").addEventListener("click", () => this.drawer(false));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.drawer(false);
    });
    // The content beside an open drawer is inert: a click there reaches what contains it.
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
    // All but the main landmark and the page's heading, which assistive technology always looks for.
    const beside = document.querySelectorAll("#content > :not(main), main > :not(h1)");
    for (const part of beside) part.inert = open;
    byId(open ? "sidebar-close" : "sidebar-open").focus();
  }

  show(conversations, currentId) {
    const content = JSON.stringify([currentId, conversations.map(({ id, title }) => [id, title])]);
    if (content === this.content) return; // while another tab writes, the buttons here stay usable
    this.content = content;
    byId("conversations").replaceChildren(...conversations.map((conversation) =>
      this.item(conversation, conversation.id === currentId)));
  }

  item({ id, title }, isCurrent) {
    const open = button(title, "conversation", () => {
      this.drawer(false);
      this.actions.open(id);
    });
    open.title = title;
    const item = element("li", isCurrent ? "current" : "", open);
    if (!isCurrent) return item;
    open.setAttribute("aria-current", "true");
    const rename = button("Rename", "quiet", async () => {
      const line = (await askLine("Title of this conversation", "Rename", title))?.trim();
      if (line) this.actions.rename(id, line);
    });
    const remove = button("Delete", "quiet", async () => {
      if (await confirmed(`Delete “${title}”? This cannot be undone.`, "Delete")) this.actions.remove(id);
    });
    item.append(element("div", "row", rename, remove));
    return item;
  }
}
