// What the user has set, kept in localStorage, and the dialog that changes it. Null: the model's choice.

import { byId, element } from "./dom.js";

const KEY = "webgemma.settings";
const NUMBERS = [
  { name: "temperature", label: "Temperature", least: 0, most: 5, hint: "0 is the likeliest word" },
  { name: "top_k", label: "Top-k", least: 0, most: 100000, whole: true, hint: "0 is no limit" },
  { name: "top_p", label: "Top-p", least: 0, most: 1, hint: "0 to 1" },
  { name: "min_p", label: "Min-p", least: 0, most: 1, hint: "0 to 1" },
  { name: "seed", label: "Seed", least: 0, most: 4294967295, whole: true, hint: "repeats a reply", empty: "random" },
  { name: "context", label: "Context", least: 16, most: 1048576, whole: true, hint: "tokens in all" },
  { name: "max_tokens", label: "Most tokens", least: 1, most: 1048576, whole: true, hint: "in one reply" },
];

const defaults = () => ({
  system: "", think: false, ...Object.fromEntries(NUMBERS.map(({ name }) => [name, null])),
});

function allowed({ least, most, whole }, value) {
  return value === null
    || (typeof value === "number" && value >= least && value <= most && (!whole || Number.isInteger(value)));
}

/** What is kept, without what does not belong there. */
export function readSettings() {
  const settings = defaults();
  try {
    const kept = JSON.parse(localStorage.getItem(KEY)) ?? {};
    if (typeof kept.system === "string") settings.system = kept.system;
    settings.think = kept.think === true;
    for (const field of NUMBERS) {
      if (field.name in kept && allowed(field, kept[field.name])) settings[field.name] = kept[field.name];
    }
  } catch { /* nothing is kept, or it cannot be read */ }
  return settings;
}

function keep(settings) {
  try {
    localStorage.setItem(KEY, JSON.stringify(settings));
  } catch { /* storage is forbidden: they last as long as the page */ }
}

/** For the worker: how to load. */
export const loadOptions = ({ context }) => ({ context, precision: "auto" });

/** For the worker: how to choose the words of a reply. */
export function chatSettings(settings) {
  const { temperature, top_k, top_p, min_p, seed, max_tokens, think } = settings;
  return { temperature, top_k, top_p, min_p, seed, max_tokens, think };
}

function numberField({ name, label, least, most, whole, hint, empty = "model’s own" }) {
  const input = element("input");
  Object.assign(input, { type: "number", name, min: least, max: most, step: whole ? 1 : "any", placeholder: empty });
  return element("label", "", label, input, element("small", "", hint));
}

/** The dialog; calls `changed(settings, before)` when it is saved. */
export class SettingsDialog {
  constructor(settings, changed) {
    this.settings = settings;
    this.changed = changed;
    this.dialog = byId("settings-dialog");
    this.form = byId("settings-form");
    byId("number-fields").append(...NUMBERS.map(numberField));
    byId("settings-button").addEventListener("click", () => this.open());
    byId("settings-reset").addEventListener("click", () => this.fill(defaults()));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
  }

  open() {
    this.fill(this.settings);
    this.dialog.showModal();
  }

  fill(settings) {
    const { elements } = this.form;
    elements.system.value = settings.system;
    elements.think.checked = settings.think;
    for (const { name } of NUMBERS) elements[name].value = settings[name] ?? "";
    this.complain("");
  }

  complain(sentence) {
    byId("settings-problem").textContent = sentence;
  }

  save() {
    const { elements } = this.form;
    const settings = { system: elements.system.value, think: elements.think.checked };
    for (const field of NUMBERS) {
      const input = elements[field.name];
      const value = input.value === "" ? null : input.valueAsNumber;
      if (input.validity.badInput || !allowed(field, value)) {
        this.complain(`${field.label} is a ${field.whole ? "whole " : ""}number from ${field.least} to ${field.most}, or empty.`);
        input.focus();
        return;
      }
      settings[field.name] = value;
    }
    const before = this.settings;
    this.settings = settings;
    keep(settings);
    this.dialog.close();
    this.changed(settings, before);
  }
}
