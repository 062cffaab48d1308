// How fast bytes come, and how long the rest will take.

import { humanSeconds, humanSize } from "./dom.js";

const WINDOW_SECONDS = 4; // the speed is that of the last seconds

export class Pace {
  constructor() {
    this.samples = [];
  }

  /** What is known at this moment: "1.2 GB of 7.2 GB · 85 MB/s · 1 min left". */
  facts(done, total, seconds = performance.now() / 1000) {
    this.samples = this.samples.filter((sample) => seconds - sample.seconds < WINDOW_SECONDS && sample.done <= done);
    this.samples.push({ seconds, done });
    const [first] = this.samples;
    const span = seconds - first.seconds;
    const speed = span > 0.2 ? (done - first.done) / span : 0;
    const facts = [total ? `${humanSize(done)} of ${humanSize(total)}` : humanSize(done)];
    if (speed > 0) {
      facts.push(`${humanSize(speed)}/s`);
      if (total > done) facts.push(`${humanSeconds((total - done) / speed)} left`);
    }
    return facts.join(" · ");
  }
}
