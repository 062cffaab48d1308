// A model on its way into this browser's storage: how far it has come, and Stop.

import { button, byId, element } from "./dom.js";
import { Pace } from "./pace.js";

const STAYS = "What has come stays: go on from the list of models.";
const STAGES = { copying: "Keeping", checking: "Checking" };

/** What is shown of a copy; a screen reader hears of it now and then. */
class Line {
  constructor(stop) {
    this.name = element("span", "name");
    this.stop = button("Stop", "quiet", stop);
    this.stop.setAttribute("aria-label", "Stop keeping");
    this.bar = element("progress");
    this.facts = element("p", "pace");
    this.box = element("div", "keeping", element("div", "row", this.name, this.stop), this.bar, this.facts);
    this.news = element("p", "visually-hidden");
    this.news.setAttribute("role", "status");
    this.hide();
  }

  show(title, { id, done, total }, facts) {
    this.box.hidden = false;
    this.name.textContent = title;
    this.bar.ariaLabel = title;
    this.stop.disabled = id === null; // the worker has not begun
    this.facts.textContent = facts;
    if (total) Object.assign(this.bar, { max: total, value: Math.min(done, total) });
    else this.bar.removeAttribute("value");
    const quarters = total ? Math.floor((4 * done) / total) : 0;
    const news = quarters ? `${title}: ${25 * quarters} %` : title;
    if (this.news.textContent !== news) this.news.textContent = news;
  }

  hide() {
    this.box.hidden = true;
    this.news.textContent = "";
  }
}

/** One copy at a time. Dispatches "change" when one begins or ends; `tell(sentence)` is for the user. */
export class Keeping extends EventTarget {
  constructor(engine, stored, tell) {
    super();
    this.engine = engine;
    this.stored = stored;
    this.tell = tell;
    this.now = null; // {id, name, stage, done, total}
    this.pace = new Pace();
    this.line = new Line(() => engine.leave(this.now.id));
    this.moveTo(byId("keeping"));
    engine.addEventListener("keeping", ({ detail }) => this.show(detail));
    engine.addEventListener("left", () => this.end());
    engine.addEventListener("kept", ({ detail }) => {
      this.end();
      tell(`${detail.name} is kept in this browser: it loads from here, also offline.`);
    });
    engine.addEventListener("error", ({ detail }) => {
      if (detail.keep === undefined) return;
      this.end();
      const has = this.stored.models.some(({ id, have }) => id === detail.keep && have > 0);
      tell(has && detail.kind !== "storage" ? `${detail.sentence} ${STAYS}` : detail.sentence, true);
    });
  }

  /** Show it where the user looks. */
  moveTo(place) {
    place.append(this.line.box, this.line.news);
  }

  /** Copy a source, or go on with it. */
  start(source) {
    if (this.now) return;
    const { name } = source.kind === "file" ? source.file : source;
    const parts = source.eyes ? [source, source.eyes] : [source];
    const nbytes = parts.reduce((sum, part) => sum + (part.file?.size ?? part.nbytes), 0);
    const have = parts.reduce((sum, part) => sum + (this.stored.copyOf(part)?.have ?? 0), 0);
    const shortage = this.stored.shortage(name, nbytes, have);
    if (shortage) {
      this.tell(shortage, true);
      return;
    }
    navigator.storage?.persist?.().catch(() => {}); // refused: the browser may need the room one day
    this.engine.keep(source);
    this.show({ id: null, name, stage: "copying", done: 0, total: 0 });
    this.dispatchEvent(new Event("change"));
  }

  show(now) {
    const isNews = now.id !== this.now?.id;
    if (now.stage !== this.now?.stage) this.pace = new Pace();
    this.now = now;
    const facts = now.total ? this.pace.facts(now.done, now.total) : "";
    const title = `${STAGES[now.stage]} ${now.name}`;
    this.line.show(title, now, facts);
    if (isNews) this.dispatchEvent(new Event("change"));
  }

  end() {
    this.now = null;
    this.line.hide();
    this.dispatchEvent(new Event("change"));
  }
}
