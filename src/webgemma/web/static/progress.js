// Progress of transfers: the speed and the remaining time, and the bar of the model that is loading.

import { byId, humanSeconds, humanSize } from "./dom.js";
import { t } from "./language.js";

const WINDOW_SECONDS = 4; // over which the speed is measured

/** The speed of a transfer over the last seconds. */
export class TransferRate {
  constructor() {
    this.samples = [];
  }

  /** Add a measurement and return a text: "1.2 GB of 7.2 GB · 85 MB/s · 1 min left". */
  facts(done, total, seconds = performance.now() / 1000) {
    this.samples = this.samples.filter((sample) => seconds - sample.seconds < WINDOW_SECONDS && sample.done <= done);
    this.samples.push({ seconds, done });
    const [first] = this.samples;
    const span = seconds - first.seconds;
    const speed = span > 0.2 ? (done - first.done) / span : 0;
    const facts = [total ? t("{done} of {total}", { done: humanSize(done), total: humanSize(total) }) : humanSize(done)];
    if (speed > 0) {
      facts.push(t("{size}/s", { size: humanSize(speed) }));
      if (total > done) facts.push(t("{time} left", { time: humanSeconds((total - done) / speed) }));
    }
    return facts.join(" · ");
  }
}

let loadingRate = new TransferRate();

export function startLoading(name) {
  loadingRate = new TransferRate();
  byId("loading-name").textContent = t("Loading {name}", { name });
  byId("loading-facts").textContent = "";
  byId("loading-bar").removeAttribute("value"); // the progress is not known yet
  byId("loading").hidden = false;
}

export function showLoading({ loaded, total }) {
  byId("loading-facts").textContent = loadingRate.facts(loaded, total);
  if (!total) return;
  byId("loading-bar").max = total;
  byId("loading-bar").value = Math.min(loaded, total);
}

export function endLoading() {
  byId("loading").hidden = true;
}
