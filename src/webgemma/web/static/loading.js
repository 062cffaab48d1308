// How far the model that is being loaded has come.

import { byId } from "./dom.js";
import { Pace } from "./pace.js";

let pace = new Pace();

export function startLoading(name) {
  pace = new Pace();
  byId("loading-name").textContent = `Loading ${name}`;
  byId("loading-facts").textContent = "";
  byId("loading-bar").removeAttribute("value"); // how far is not known yet
  byId("loading").hidden = false;
}

export function endLoading() {
  byId("loading").hidden = true;
}

export function showProgress({ loaded, total }) {
  byId("loading-facts").textContent = pace.facts(loaded, total);
  if (!total) return;
  byId("loading-bar").max = total;
  byId("loading-bar").value = Math.min(loaded, total);
}
