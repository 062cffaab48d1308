// The dialog in which the model learns: examples, options, whether they fit, the loss, the adapters.

import { AdapterList } from "./adapters.js";
import { lossChart } from "./chart.js";
import { byId, element, humanSize } from "./dom.js";

const MOST_NBYTES = 100_000_000; // of examples: Python reads them in memory
const NUMBERS = [
  { name: "rank", label: "Rank", least: 1, most: 256, value: 16, hint: "how much it can hold" },
  { name: "epochs", label: "Epochs", least: 1, most: 1000, value: 3, hint: "how often each is seen" },
  { name: "rate", label: "Learning rate", least: 1e-7, most: 0.5, value: 0.0002, hint: "the highest", broken: true },
];
const MORE = [
  { name: "steps", label: "Steps", least: 1, most: 100000, value: null, hint: "so many, if given" },
  { name: "batch", label: "At once", least: 1, most: 64, value: 4, hint: "examples in a step" },
  { name: "max_length", label: "Longest", least: 16, most: 8192, value: 512, hint: "tokens; longer are cut" },
  { name: "held_out", label: "Held out", least: 0, most: 50, value: 0, hint: "% of the rows, to judge by", broken: true },
];

function numberField({ name, label, least, most, value, hint, broken }) {
  const input = element("input");
  Object.assign(input, { type: "number", name, min: least, max: most, step: broken ? "any" : 1, value: value ?? "" });
  if (value === null) input.placeholder = "by epochs";
  return element("label", "", label, input, element("small", "", hint));
}

const many = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;

/** Calls `changed()` when learning begins or ends, and `tell(sentence, action)` while the dialog is closed. */
export class TuneDialog {
  constructor(engine, changed, tell) {
    this.engine = engine;
    this.changed = changed;
    this.tell = tell;
    this.examples = null; // {name, data}
    this.isExamining = false;
    this.isStale = false; // the options have changed since they were last looked at
    this.fits = false;
    this.losses = [];
    this.judged = [];
    this.list = new AdapterList(engine);
    this.dialog = byId("tune-dialog");
    this.form = byId("tune-form");
    byId("tune-fields").append(...NUMBERS.map(numberField));
    byId("tune-more").append(...MORE.map(numberField));
    this.listen();
    this.show();
  }

  listen() {
    const { engine } = this;
    byId("tune-button").addEventListener("click", () => this.open());
    byId("tune-choose").addEventListener("click", () => byId("tune-file").click());
    byId("tune-file").addEventListener("change", ({ target }) => {
      if (target.files.length) this.take(target.files[0]);
      target.value = ""; // the same file may be chosen again
    });
    this.form.addEventListener("change", () => this.examine());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    byId("tune-stop").addEventListener("click", () => {
      engine.enough();
      byId("tune-state").textContent = "Stopping after this step …";
    });
    engine.addEventListener("loaded", () => {
      this.isExamining = false; // of the model before
      this.examine();
    });
    engine.addEventListener("examined", ({ detail }) => this.examined(detail));
    engine.addEventListener("tuning", ({ detail }) => this.step(detail));
    engine.addEventListener("tuned", ({ detail }) => this.end(detail));
    engine.addEventListener("error", ({ detail }) => this.fail(detail));
  }

  open() {
    this.engine.askAdapters();
    this.show();
    if (!this.dialog.open) this.dialog.showModal();
    byId("tune-title").focus();
  }

  /** Take examples from a file. */
  async take(file) {
    this.open();
    if (this.engine.isLearning) return;
    this.examples = null;
    this.report("");
    this.complain("");
    try {
      if (file.size > MOST_NBYTES) throw new Error(`it has ${humanSize(file.size)}, more than ${humanSize(MOST_NBYTES)}`);
      const data = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      this.examples = { name: file.name, data };
    } catch (error) {
      this.complain(`${file.name} cannot be learnt from: ${error instanceof TypeError ? "it is no text in UTF-8" : error.message}.`);
    }
    this.show();
    this.examine();
  }

  /** The options, or null where one is wrong, which is said. */
  options() {
    const { elements } = this.form;
    const options = { name: this.examples.name, parts: elements.parts.value };
    for (const { name, label, least, most, value, broken } of [...NUMBERS, ...MORE]) {
      const input = elements[name];
      const number = input.value === "" ? value : input.valueAsNumber;
      const isRight = number === null || (number >= least && number <= most && (broken || Number.isInteger(number)));
      if (input.validity.badInput || !isRight) {
        this.complain(`${label} is a ${broken ? "" : "whole "}number from ${least} to ${most}.`);
        return null;
      }
      options[name] = name === "held_out" ? number / 100 : number;
    }
    return options;
  }

  /** Have the worker look at examples and options; one look at a time. */
  examine() {
    this.fits = false;
    byId("tune-fit").textContent = "";
    if (this.examples && this.engine.state === "loaded" && !this.engine.isLearning) {
      this.isStale = this.isExamining;
      this.complain("");
      const options = this.isExamining ? null : this.options();
      if (options) {
        this.isExamining = true;
        byId("tune-fit").textContent = "Looking at the examples …";
        this.engine.examine(this.examples.data, options);
      }
    }
    this.show();
  }

  examined(found) {
    this.isExamining = false;
    if (this.isStale || !this.examples) {
      this.examine();
      return;
    }
    const cut = found.truncated ? ` ${many(found.truncated, "row")} cut to the longest length.` : "";
    const skipped = found.skipped_count ? ` ${many(found.skipped_count, "row")} cannot be used:` : "";
    this.report(`${this.examples.name}: ${many(found.examples, "example")} of ${many(found.rows, "row")}, `
      + `${found.tokens} tokens, ${found.targets} of them to learn.${cut}${skipped}`, found.skipped);
    this.fits = found.free_nbytes >= found.nbytes;
    const needs = `${many(found.steps, "step")}; learning takes ${humanSize(found.nbytes)} of the GPU beside the model`;
    byId("tune-fit").textContent = this.fits ? `${needs}. It fits.`
      : `${needs}, which can give ${humanSize(found.free_nbytes)}: take fewer examples at once, shorter ones, or a lower rank.`;
    this.show();
  }

  report(sentence, skipped = []) {
    byId("tune-data").textContent = sentence;
    byId("tune-skipped").replaceChildren(...skipped.map(([line, why]) => element("li", "", `Line ${line}: ${why}`)));
  }

  complain(sentence) {
    byId("tune-problem").textContent = sentence;
  }

  start() {
    const options = this.fits && this.engine.state === "loaded" ? this.options() : null;
    if (!options) return;
    this.complain("");
    this.losses = [];
    this.judged = [];
    byId("tune-chart").hidden = true;
    byId("tune-state").textContent = "Beginning …";
    this.engine.tune(this.examples.data, options);
    this.show();
    byId("tune-stop").focus();
    this.changed();
  }

  step({ step, steps, loss, judged, tokens_per_second }) {
    this.losses.push(loss);
    if (judged !== null) this.judged.push({ step, loss: judged });
    const speed = tokens_per_second ? ` · ${Math.round(tokens_per_second)} tokens/s` : "";
    byId("tune-state").textContent = `Step ${step} of ${steps} · loss ${loss.toFixed(2)}${speed}`;
    byId("tune-button").textContent = `Learning ${Math.floor((100 * step) / steps)} %`;
    byId("tune-chart").hidden = false;
    byId("tune-chart").replaceChildren(...lossChart(this.losses, this.judged, steps));
  }

  end({ id, name, steps, loss, stopped }) {
    const how = `${stopped ? "Stopped" : "Done"} after ${many(steps, "step")}`;
    const sentence = id ? `${how}, loss ${loss.toFixed(2)}: the adapter ${name} is there to be applied.` : `${how}: nothing was learnt.`;
    this.ended(sentence);
    if (!this.dialog.open) this.tell(sentence, id && { name: `Apply ${name}`, act: () => this.engine.adapt(id) });
  }

  fail({ tune, sentence }) {
    const hasEnded = byId("tune-stop").hidden === false && !this.engine.isLearning;
    if (hasEnded) this.ended("");
    if (tune === undefined || this.engine.state === "empty") return; // the page tells
    if (tune === "examine") {
      this.isExamining = false;
      byId("tune-fit").textContent = "";
      if (this.isStale) {
        this.examine();
        return;
      }
    }
    if (this.dialog.open) this.complain(sentence);
    else this.tell(sentence);
  }

  ended(sentence) {
    byId("tune-state").textContent = sentence;
    const wasThere = document.activeElement === byId("tune-stop");
    this.show();
    if (wasThere) byId("tune-start").focus();
    this.changed();
  }

  /** Show what can be done now. */
  show() {
    const { isLearning, state } = this.engine;
    byId("tune-start").hidden = isLearning;
    byId("tune-start").disabled = !this.fits || state !== "loaded";
    byId("tune-stop").hidden = !isLearning;
    byId("tune-choose").disabled = isLearning;
    for (const control of this.form.querySelectorAll("input, select")) control.disabled = isLearning;
    if (!isLearning) byId("tune-button").textContent = "Fine-tune";
    this.list.show();
  }
}
