// The fine-tuning dialog: examples, options, whether training fits the GPU, the loss, and the adapters.

import { AdapterList } from "./adapters.js";
import { lossChart } from "./chart.js";
import { byId, element, humanSize } from "./dom.js";
import { decimal, plural, t } from "./language.js";

const MAX_NBYTES = 100_000_000; // of a file of examples: Python parses it in memory
const NUMBERS = [
  { name: "rank", label: t("Rank"), min: 1, max: 256, value: 16, hint: t("size of the adapter") },
  { name: "epochs", label: t("Epochs"), min: 1, max: 1000, value: 3, hint: t("passes over the data") },
  { name: "learning_rate", label: t("Learning rate"), min: 1e-7, max: 0.5, value: 0.0002, hint: t("the maximum"), decimal: true },
];
const MORE_NUMBERS = [
  { name: "steps", label: t("Steps"), min: 1, max: 100000, value: null, hint: t("the exact number, if set") },
  { name: "batch", label: t("Batch size"), min: 1, max: 64, value: 4, hint: t("examples per step") },
  { name: "max_length", label: t("Max length"), min: 16, max: 8192, value: 512, hint: t("tokens; longer ones are cut") },
  { name: "held_out", label: t("Held out"), min: 0, max: 50, value: 0, hint: t("% of the rows, for testing"), decimal: true },
];

function numberField({ name, label, min, max, value, hint, decimal }) {
  const input = element("input");
  Object.assign(input, { type: "number", name, min, max, step: decimal ? "any" : 1, value: value ?? "" });
  if (value === null) input.placeholder = t("by epochs");
  return element("label", "", label, input, element("small", "", hint));
}

/** Calls `changed()` when training starts or ends, and `notify(message, action)` while the dialog is closed. */
export class TuneDialog {
  constructor(engine, changed, notify) {
    this.engine = engine;
    this.changed = changed;
    this.notify = notify;
    this.examples = null; // {name, data}
    this.isExamining = false;
    this.isStale = false; // the options have changed since the examination started
    this.fits = false;
    this.losses = [];
    this.heldOutLosses = []; // [{step, loss}]
    this.list = new AdapterList(engine);
    this.dialog = byId("tune-dialog");
    this.form = byId("tune-form");
    byId("tune-fields").append(...NUMBERS.map(numberField));
    byId("tune-more").append(...MORE_NUMBERS.map(numberField));
    this.addListeners();
    this.show();
  }

  addListeners() {
    const { engine } = this;
    byId("tune-button").addEventListener("click", () => this.open());
    byId("tune-choose").addEventListener("click", () => byId("tune-file").click());
    byId("tune-file").addEventListener("change", ({ target }) => {
      if (target.files.length) this.read(target.files[0]);
      target.value = ""; // the same file may be chosen again
    });
    this.form.addEventListener("change", () => this.examine());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    byId("tune-stop").addEventListener("click", () => {
      engine.stopTuning();
      byId("tune-state").textContent = t("Stopping after this step …");
    });
    engine.addEventListener("loaded", () => {
      this.isExamining = false; // an examination was of the previous model
      this.examine();
    });
    engine.addEventListener("examined", ({ detail }) => this.onExamined(detail));
    engine.addEventListener("tuning", ({ detail }) => this.onStep(detail));
    engine.addEventListener("tuned", ({ detail }) => this.onTuned(detail));
    engine.addEventListener("error", ({ detail }) => this.onError(detail));
  }

  open() {
    this.engine.listAdapters();
    this.show();
    if (!this.dialog.open) this.dialog.showModal();
    byId("tune-title").focus();
  }

  /** Read examples from a file. */
  async read(file) {
    this.open();
    if (this.engine.isTuning) return;
    this.examples = null;
    this.showData("");
    this.showProblem("");
    try {
      if (file.size > MAX_NBYTES) {
        this.showProblem(t("{file} cannot be used: it has {size}, more than {most}.", {
          file: file.name, size: humanSize(file.size), most: humanSize(MAX_NBYTES),
        }));
        this.show();
        return;
      }
      const data = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      this.examples = { name: file.name, data };
    } catch (error) {
      this.showProblem(error instanceof TypeError
        ? t("{file} cannot be used: it is not UTF-8 text.", { file: file.name })
        : t("{file} cannot be used ({problem}).", { file: file.name, problem: error.message }));
    }
    this.show();
    this.examine();
  }

  /** Return the options; if one is not valid, show that and return null. */
  options() {
    const { elements } = this.form;
    const options = { name: this.examples.name, targets: elements.targets.value };
    for (const { name, label, min, max, value, decimal } of [...NUMBERS, ...MORE_NUMBERS]) {
      const input = elements[name];
      const number = input.value === "" ? value : input.valueAsNumber;
      const isValid = number === null || (number >= min && number <= max && (decimal || Number.isInteger(number)));
      if (input.validity.badInput || !isValid) {
        this.showProblem(decimal
          ? t("{field} must be a number from {min} to {max}.", { field: label, min, max })
          : t("{field} must be a whole number from {min} to {max}.", { field: label, min, max }));
        return null;
      }
      options[name] = name === "held_out" ? number / 100 : number;
    }
    return options;
  }

  /** Have the worker check the examples and options, one request at a time. */
  examine() {
    this.fits = false;
    byId("tune-fit").textContent = "";
    if (this.examples && this.engine.state === "loaded" && !this.engine.isTuning) {
      this.isStale = this.isExamining;
      this.showProblem("");
      const options = this.isExamining ? null : this.options();
      if (options) {
        this.isExamining = true;
        byId("tune-fit").textContent = t("Checking the examples …");
        this.engine.examine(this.examples.data, options);
      }
    }
    this.show();
  }

  onExamined(facts) {
    this.isExamining = false;
    if (this.isStale || !this.examples) {
      this.examine();
      return;
    }
    this.showData([
      t("{file}: {examples} from {rows}, {tokens} tokens, {targets} of them to learn.", {
        file: this.examples.name, tokens: facts.tokens, targets: facts.targets,
        examples: plural(facts.examples, "{count} example", "{count} examples"), rows: plural(facts.rows, "{count} row", "{count} rows"),
      }),
      facts.truncated && plural(facts.truncated, "{count} row cut to the maximum length.", "{count} rows cut to the maximum length."),
      facts.skipped_count && plural(facts.skipped_count, "{count} row cannot be used:", "{count} rows cannot be used:"),
    ].filter(Boolean).join(" "), facts.skipped);
    this.fits = facts.free_nbytes >= facts.nbytes;
    const needs = {
      steps: plural(facts.steps, "{count} step", "{count} steps"), size: humanSize(facts.nbytes), free: humanSize(facts.free_nbytes),
    };
    byId("tune-fit").textContent = this.fits
      ? t("{steps}; training needs {size} of GPU memory in addition to the model. It fits.", needs)
      : t("{steps}; training needs {size} of GPU memory in addition to the model, but {free} is free: use a smaller batch, shorter examples or a lower rank.", needs);
    this.show();
  }

  showData(message, skipped = []) {
    byId("tune-data").textContent = message;
    byId("tune-skipped").replaceChildren(...skipped.map(([line, reason]) => element("li", "", t("Line {line}: {reason}", { line, reason }))));
  }

  showProblem(message) {
    byId("tune-problem").textContent = message;
  }

  start() {
    const options = this.fits && this.engine.state === "loaded" ? this.options() : null;
    if (!options) return;
    this.showProblem("");
    this.losses = [];
    this.heldOutLosses = [];
    byId("tune-chart").hidden = true;
    byId("tune-state").textContent = t("Starting …");
    this.engine.tune(this.examples.data, options);
    this.show();
    byId("tune-stop").focus();
    this.changed();
  }

  onStep({ step, steps, loss, held_out_loss, tokens_per_second }) {
    this.losses.push(loss);
    if (held_out_loss !== null) this.heldOutLosses.push({ step, loss: held_out_loss });
    byId("tune-state").textContent = [
      t("Step {step} of {steps}", { step, steps }), t("loss {loss}", { loss: decimal(loss, 2) }),
      tokens_per_second && t("{speed} tokens/s", { speed: Math.round(tokens_per_second) }),
    ].filter(Boolean).join(" · ");
    byId("tune-label").textContent = t("Training {percent} %", { percent: Math.floor((100 * step) / steps) });
    byId("tune-chart").hidden = false;
    byId("tune-chart").replaceChildren(...lossChart(this.losses, this.heldOutLosses, steps));
  }

  onTuned({ id, name, steps, loss, stopped }) {
    const ended = stopped ? plural(steps, "Stopped after {count} step.", "Stopped after {count} steps.")
      : plural(steps, "Done after {count} step.", "Done after {count} steps.");
    const outcome = id ? t("Loss {loss}: the adapter {name} is ready to apply.", { loss: decimal(loss, 2), name }) : t("No adapter was trained.");
    const message = `${ended} ${outcome}`;
    this.end(message);
    if (!this.dialog.open) this.notify(message, id && { name: t("Apply {name}", { name }), act: () => this.engine.applyAdapter(id) });
  }

  onError({ tune, message }) {
    const hasEnded = byId("tune-stop").hidden === false && !this.engine.isTuning;
    if (hasEnded) this.end("");
    if (tune === undefined || this.engine.state === "empty") return; // tab_home.js shows it
    if (tune === "examine") {
      this.isExamining = false;
      byId("tune-fit").textContent = "";
      if (this.isStale) {
        this.examine();
        return;
      }
    }
    if (this.dialog.open) this.showProblem(message);
    else this.notify(message);
  }

  /** Show that training has ended. */
  end(message) {
    byId("tune-state").textContent = message;
    const hadFocus = document.activeElement === byId("tune-stop");
    this.show();
    if (hadFocus) byId("tune-start").focus();
    this.changed();
  }

  /** Show and enable the controls that apply. */
  show() {
    const { isTuning, state } = this.engine;
    byId("tune-start").hidden = isTuning;
    byId("tune-start").disabled = !this.fits || state !== "loaded";
    byId("tune-stop").hidden = !isTuning;
    byId("tune-choose").disabled = isTuning;
    for (const control of this.form.querySelectorAll("input, select")) control.disabled = isTuning;
    if (!isTuning) byId("tune-label").textContent = t("Fine-tune");
    this.list.show();
  }
}
