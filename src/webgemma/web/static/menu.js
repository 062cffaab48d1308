// A menu at a button: arrows, Home, End and first letters move, Enter chooses, Escape and a click elsewhere close it.

import { button, element } from "./dom.js";

const MARGIN_PIXELS = 8; // to the edges of the window

/** A menu that buttons share; it is a child of `parent`. */
export class Menu {
  constructor(parent) {
    this.node = element("div", "menu");
    this.node.role = "menu";
    this.node.popover = "auto";
    this.owner = null; // the button that has opened it
    parent.append(this.node);
    this.node.addEventListener("keydown", (event) => this.onKey(event));
    this.node.addEventListener("beforetoggle", ({ newState }) => { // at once, unlike "toggle"
      if (newState === "closed") this.owner?.setAttribute("aria-expanded", "false");
    });
    addEventListener("resize", () => this.close());
    addEventListener("scroll", ({ target }) => target.contains(this.owner) && this.close(), { capture: true, passive: true });
  }

  /** Return a button that opens the menu with the entries that `entries()` returns: {name, className?, act}. */
  opener(name, className, label, entries) {
    const opener = button(name, className, () => {
      if (!wasOpen) this.open(opener, entries());
    });
    let wasOpen = false; // when the pointer came down, which closes it
    opener.addEventListener("pointerdown", () => { wasOpen = this.isOpenAt(opener); });
    opener.addEventListener("keydown", () => { wasOpen = false; });
    opener.ariaLabel = label;
    opener.setAttribute("aria-haspopup", "menu");
    opener.setAttribute("aria-expanded", "false");
    return opener;
  }

  isOpenAt(opener) {
    return this.owner === opener && this.node.matches(":popover-open");
  }

  open(opener, entries) {
    this.owner = opener;
    this.node.ariaLabel = opener.ariaLabel;
    this.node.replaceChildren(...entries.map(({ name, className = "", act }) => {
      const item = button(name, className, () => {
        this.close();
        act();
      });
      item.role = "menuitem";
      item.tabIndex = -1;
      return item;
    }));
    this.node.showPopover();
    opener.setAttribute("aria-expanded", "true");
    this.moveTo(opener);
    this.node.firstElementChild.focus();
  }

  /** Move it below its button, or above where there is no room. */
  moveTo(opener) {
    const at = opener.getBoundingClientRect();
    const { width, height } = this.node.getBoundingClientRect();
    const isRightToLeft = getComputedStyle(opener).direction === "rtl";
    const left = isRightToLeft ? at.left : at.right - width;
    const isBelow = at.bottom + height + MARGIN_PIXELS <= innerHeight;
    const top = isBelow ? at.bottom : at.top - height;
    const within = (value, most) => `${Math.max(MARGIN_PIXELS, Math.min(value, most - MARGIN_PIXELS))}px`;
    this.node.style.left = within(left, innerWidth - width);
    this.node.style.top = within(top, innerHeight - height);
  }

  close() {
    if (!this.node.matches(":popover-open")) return;
    this.node.hidePopover();
    this.owner.focus({ preventScroll: true });
  }

  onKey(event) {
    const items = [...this.node.children];
    const at = items.indexOf(document.activeElement);
    const target = {
      ArrowDown: () => items[(at + 1) % items.length],
      ArrowUp: () => items.at(at - 1),
      Home: () => items[0],
      End: () => items.at(-1),
    }[event.key]?.() ?? this.startingWith(event, items, at);
    if (target) target.focus();
    else if (["Escape", "Tab"].includes(event.key)) this.close();
    else return;
    event.stopPropagation(); // Escape also stops a reply
    if (event.key !== "Tab") event.preventDefault();
  }

  /** Return the next item whose name starts with the letter of a key. */
  startingWith({ key, ctrlKey, metaKey, altKey }, items, at) {
    if (key.length !== 1 || key === " " || ctrlKey || metaKey || altKey) return null;
    const following = [...items.slice(at + 1), ...items.slice(0, at + 1)];
    return following.find(({ textContent }) => textContent.toLowerCase().startsWith(key.toLowerCase())) ?? null;
  }
}
