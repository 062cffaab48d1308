// How far a model has come: bytes, speed, and the time that is left.

import { byId, humanSeconds, humanSize } from "./dom.js";

const WINDOW_SECONDS = 4; // the speed is that of the last seconds
let samples = [];

export function startLoading(name) {
  samples = [];
  byId("loading-name").textContent = `Loading ${name}`;
  byId("loading-facts").textContent = "";
  byId("loading-bar").removeAttribute("value"); // how far is not known yet
  byId("loading").hidden = false;
}

export function endLoading() {
  byId("loading").hidden = true;
}

/** What is known of a load: "1.2 GB of 7.2 GB · 85 MB/s · 1 min left". */
export function loadingFacts(loaded, total, nbytesPerSecond) {
  const facts = [total ? `${humanSize(loaded)} of ${humanSize(total)}` : humanSize(loaded)];
  if (nbytesPerSecond > 0) {
    facts.push(`${humanSize(nbytesPerSecond)}/s`);
    if (total > loaded) facts.push(`${humanSeconds((total - loaded) / nbytesPerSecond)} left`);
  }
  return facts.join(" · ");
}

export function showProgress({ loaded, total }, seconds = performance.now() / 1000) {
  samples = samples.filter((sample) => seconds - sample.seconds < WINDOW_SECONDS && sample.loaded <= loaded);
  samples.push({ seconds, loaded });
  const span = seconds - samples[0].seconds;
  const speed = span > 0.2 ? (loaded - samples[0].loaded) / span : 0;
  byId("loading-facts").textContent = loadingFacts(loaded, total, speed);
  if (!total) return;
  byId("loading-bar").max = total;
  byId("loading-bar").value = Math.min(loaded, total);
}
