// The sidebar with the list of conversations; on small screens it is a drawer, on others it can be hidden.

import { dateGroups } from "./dates.js";
import { button, byId, element, randomId } from "./dom.js";
import { LANGUAGE_NAMES, chooseLanguage, chosenLanguage, t } from "./language.js";
import { Menu } from "./menu.js";
import { isPinned } from "./tree.js";

const KEY = "webgemma.sidebar"; // in localStorage: "hidden"; theme.js applies it before the first paint
const WIDE = matchMedia("(min-width: 48.01rem)");

/** Make these the children of a node, and move only those that are elsewhere. */
function setChildren(parent, nodes) {
  const kept = new Set(nodes);
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
  nodes.forEach((node, i) => {
    if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] ?? null);
  });
}

/** Return the element of a title, whose direction is that of its text. */
export function titleElement(...parts) {
  const node = element("span", "title", ...parts);
  node.dir = "auto";
  return node;
}

/** Offer the page's languages: another one applies when the page is loaded again, which is done at once. */
function offerLanguages() {
  const choice = byId("language");
  for (const [code, name] of Object.entries(LANGUAGE_NAMES)) {
    const option = element("option", "", name);
    Object.assign(option, { value: code, lang: code });
    choice.append(option);
  }
  choice.value = chosenLanguage();
  choice.addEventListener("change", () => {
    chooseLanguage(choice.value);
    location.reload();
  });
}

/** `actions` has open(id), rename(id, title), pin(id), remove(id), and exports(id), the menu's entries that save one. */
export class Sidebar {
  constructor(actions) {
    this.actions = actions;
    this.items = new Map(); // by the id of a conversation: {node, open, more, conversation}
    this.sections = new Map(); // by name: {node, list}
    this.menu = new Menu(byId("sidebar"));
    byId("sidebar-open").addEventListener("click", () => this.reveal());
    byId("sidebar-close").addEventListener("click", () => this.hide());
    document.body.addEventListener("keydown", (event) => { // before those of the document, which stop a reply
      if (event.key !== "Escape" || !this.isOpen || document.querySelector("dialog[open]")) return;
      event.stopPropagation();
      this.drawer(false);
    });
    // The content beside an open drawer is inert: a click there reaches what contains it.
    document.addEventListener("click", (event) => {
      if (this.isOpen && !event.target.closest("#sidebar, #notice.over, dialog")) this.drawer(false);
    }, { capture: true });
    WIDE.addEventListener("change", () => {
      this.drawer(false);
      this.showState();
    });
    byId("conversations").addEventListener("keydown", (event) => this.onKey(event));
    document.addEventListener("visibilitychange", () => this.showAgain()); // another day may have begun
    offerLanguages();
    this.showState();
  }

  /** Whether the drawer of a small screen is open. */
  get isOpen() {
    return byId("sidebar").classList.contains("open");
  }

  get isVisible() {
    return WIDE.matches ? document.documentElement.dataset.sidebar !== "hidden" : this.isOpen;
  }

  /** Show the sidebar, with the focus in it. */
  reveal() {
    if (WIDE.matches) {
      this.setHidden(false);
      byId("sidebar-close").focus();
    } else this.drawer(true);
  }

  hide() {
    if (WIDE.matches) {
      this.setHidden(true);
      byId("sidebar-open").focus();
    } else this.drawer(false);
  }

  setHidden(isHidden) {
    document.documentElement.dataset.sidebar = isHidden ? "hidden" : "";
    try {
      localStorage.setItem(KEY, isHidden ? "hidden" : "");
    } catch { /* storage is forbidden: it lasts until the page is closed */ }
    this.showState();
  }

  drawer(open) {
    if (open === this.isOpen) return;
    byId("sidebar").classList.toggle("open", open);
    // All but the main landmark and the page's heading, which assistive technology always looks for.
    const beside = document.querySelectorAll("#content > :not(main), main > :not(h1)");
    for (const part of beside) part.inert = open;
    byId("notice").classList.remove("over");
    byId(open ? "sidebar-close" : "sidebar-open").focus();
    this.showState();
  }

  showState() {
    byId("sidebar-open").ariaExpanded = String(this.isVisible);
  }

  /** Show these conversations; the latest come first. */
  show(conversations, currentId) {
    this.shown = [conversations, currentId];
    const groupOf = dateGroups();
    const nameOf = (conversation) => (isPinned(conversation) ? t("Pinned") : groupOf(conversation.updated));
    const named = conversations.map((conversation) => [nameOf(conversation), conversation]);
    const content = JSON.stringify([currentId, named.map(([name, { id, title }]) => [name, id, title])]);
    if (content === this.content) return; // while another tab writes, the buttons here stay usable
    this.content = content;
    const groups = new Map([[t("Pinned"), []]]);
    for (const [name, conversation] of named) {
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(conversation);
    }
    if (!groups.get(t("Pinned")).length) groups.delete(t("Pinned"));
    const focused = document.activeElement;
    this.forget(conversations);
    const sections = [...groups].map(([name, members]) => {
      const { node, list } = this.section(name);
      setChildren(list, members.map((conversation) => this.item(conversation, conversation.id === currentId)));
      return node;
    });
    for (const name of this.sections.keys()) if (!groups.has(name)) this.sections.delete(name);
    setChildren(byId("conversations"), sections);
    if (document.activeElement !== focused && focused.isConnected) focused.focus(); // it was moved
  }

  showAgain() {
    if (this.shown) this.show(...this.shown);
  }

  /** Remove the items of conversations that are not listed any more. */
  forget(conversations) {
    const ids = new Set(conversations.map(({ id }) => id));
    for (const id of this.items.keys()) if (!ids.has(id)) this.items.delete(id);
  }

  section(name) {
    if (!this.sections.has(name)) {
      const heading = element("h2", "", name);
      const list = element("ul");
      heading.id = `group-${randomId()}`;
      list.setAttribute("aria-labelledby", heading.id);
      this.sections.set(name, { node: element("section", "", heading, list), list });
    }
    return this.sections.get(name);
  }

  /** Return the node of a conversation, always the same. */
  item(conversation, isCurrent) {
    const { id, title } = conversation;
    if (!this.items.has(id)) this.items.set(id, this.newItem(id));
    const item = this.items.get(id);
    item.conversation = conversation;
    if (item.open.textContent !== title) {
      item.open.replaceChildren(titleElement(title));
      item.open.title = title;
      item.more.ariaLabel = t("Actions for “{title}”", { title });
    }
    item.node.classList.toggle("current", isCurrent);
    if (isCurrent) item.open.setAttribute("aria-current", "true");
    else item.open.removeAttribute("aria-current");
    return item.node;
  }

  newItem(id) {
    const open = button("", "conversation", () => {
      this.drawer(false);
      this.actions.open(id);
    });
    const more = this.menu.opener("⋯", "icon more", "", () => this.entries(item));
    const item = { node: element("li", "", open, more), open, more };
    return item;
  }

  /** Return what the menu of a conversation offers. */
  entries(item) {
    const { id } = item.conversation;
    return [
      { name: t("Rename"), act: () => this.rename(item) },
      { name: isPinned(item.conversation) ? t("Unpin") : t("Pin"), act: () => this.actions.pin(id) },
      ...this.actions.exports(id),
      { name: t("Delete"), className: "danger", act: () => this.remove(item) },
    ];
  }

  /** Replace the title by a field: Enter and leaving it keep what is in it, Escape does not. */
  rename({ open, more, conversation: { id, title } }) {
    const box = element("input", "rename");
    box.value = title;
    box.dir = "auto";
    box.ariaLabel = t("Title of this conversation");
    let isOpen = true;
    const close = (isKept) => {
      if (!isOpen) return; // removing it makes it lose the focus
      isOpen = false;
      const hadFocus = document.activeElement === box;
      box.replaceWith(open);
      more.hidden = false;
      if (hadFocus) open.focus();
      const line = box.value.trim().replace(/\s+/g, " ");
      if (isKept && line && line !== title) this.actions.rename(id, line);
    };
    box.addEventListener("keydown", (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
      close(event.key === "Enter");
    });
    box.addEventListener("blur", () => close(true));
    open.replaceWith(box);
    more.hidden = true;
    box.focus();
    box.select();
  }

  /** Delete a conversation; the focus goes to the next one. */
  remove({ open, conversation: { id } }) {
    const all = this.openers();
    const at = all.indexOf(open);
    const next = all[at + 1] ?? all[at - 1];
    this.actions.remove(id);
    (next ?? byId("new-conversation")).focus();
  }

  /** Return the buttons that open conversations, as they are listed. */
  openers() {
    return [...byId("conversations").querySelectorAll(".conversation")];
  }

  /** Arrows move between conversations. */
  onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !event.target.matches(".conversation")) return;
    event.preventDefault();
    const all = this.openers();
    all[all.indexOf(event.target) + step]?.focus();
  }
}
