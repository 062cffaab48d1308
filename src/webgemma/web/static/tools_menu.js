// The menu at the message box, in which the tools of the conversation that is shown are switched on and off.

import { byId, element } from "./dom.js";
import { plural, t } from "./language.js";
import { TOOLS } from "./tools.js";

const GAP_PIXELS = 8; // between the button, the menu and the edges of the window

/** The menu; `actions` has conversation(), which is shown, and changed(conversation). */
export class ToolsMenu {
  constructor(box, actions) {
    this.box = box;
    this.actions = actions;
    this.button = byId("tools-button");
    this.menu = byId("tools-menu");
    this.switches = new Map(Object.entries(TOOLS).map(([name, tool]) => [name, this.item(name, tool)]));
    byId("tools-list").append(...[...this.switches.values()].map(({ node }) => node));
    this.menu.addEventListener("toggle", ({ newState }) => {
      const isOpen = newState === "open";
      this.button.ariaExpanded = String(isOpen);
      if (isOpen) this.place();
    });
    this.menu.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.stopPropagation(); // it closes the menu, and stops no reply
    });
    addEventListener("resize", () => this.menu.matches(":popover-open") && this.place());
    box.addEventListener("changed", () => this.show());
  }

  item(name, { label, help }) {
    const input = element("input");
    Object.assign(input, { type: "checkbox", id: `tool-${name}` });
    input.setAttribute("aria-describedby", `tool-${name}-help`);
    input.addEventListener("change", () => {
      const conversation = this.actions.conversation();
      this.box.set(conversation, name, input.checked);
      this.actions.changed(conversation);
      this.show();
    });
    const title = element("label", "", input, label());
    const note = element("small", "", help());
    title.htmlFor = input.id;
    note.id = `tool-${name}-help`;
    return { node: element("li", "", title, note), input };
  }

  /** Show the tools of the conversation that is shown. */
  show() {
    const { available } = this.box;
    const on = this.box.on(this.actions.conversation());
    for (const [name, { node, input }] of this.switches) {
      node.hidden = !available.includes(name);
      input.checked = on.includes(name);
    }
    this.button.classList.toggle("on", on.length > 0);
    this.button.ariaLabel = on.length ? plural(on.length, "Tools: {count} is on", "Tools: {count} are on") : t("Tools");
  }

  /** Place the menu above its button, inside of the window. */
  place() {
    const { left, right, top } = this.button.getBoundingClientRect();
    const { width } = this.menu.getBoundingClientRect();
    const start = document.documentElement.dir === "rtl" ? right - width : left;
    const x = Math.max(GAP_PIXELS, Math.min(start, innerWidth - width - GAP_PIXELS));
    Object.assign(this.menu.style, { left: `${x}px`, bottom: `${innerHeight - top + GAP_PIXELS}px` });
  }
}
