// The button of a model in a list to choose from.

import { button, element } from "./dom.js";

/** Return the button that calls `choose()`: the model's name, its size, and a line of facts, of which some are empty. */
export function modelButton(name, { size = "", facts = [], isCurrent = false }, choose) {
  const choice = button("", "model", choose);
  const line = element("span", "facts", facts.filter(Boolean).join(" · "));
  choice.append(element("span", "name", name), element("span", "size", size), line);
  if (isCurrent) choice.setAttribute("aria-current", "true");
  return choice;
}
