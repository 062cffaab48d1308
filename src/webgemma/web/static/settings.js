// The settings, stored in localStorage, and their dialog. A setting that is null is the model's default.
// The server lists the generation settings with their ranges, from webgemma/settings.py; a home may have more.

import { byId, element } from "./dom.js";
import { schemaProblem } from "./json.js";
import { t } from "./language.js";
import { scoped } from "./scope.js";

const KEY = scoped("webgemma.settings");

let fields = [];

/** Fetch the generation settings; without them, the dialog has those of the home only. */
export async function loadFields(ofHome) {
  fields = ofHome;
  try {
    const response = await fetch("api/settings");
    if (response.ok) fields = [...(await response.json()).settings.map(field), ...ofHome];
  } catch { /* the server does not respond, and nothing is cached */ }
}

/** Return a field of the server's list; its English label and help are keys of their translations. */
function field({ name, label, min, max, integer, help, random }) {
  return { name, label: t(label), min, max: Math.min(max ?? Infinity, Number.MAX_SAFE_INTEGER), integer, help: t(help), empty: random ? t("random") : t("default") };
}

const defaults = () => ({
  system: "", schema: "", think: false, ...Object.fromEntries(fields.map(({ name }) => [name, null])),
});

function isAllowed({ min, max, integer }, value) {
  return value === null
    || (typeof value === "number" && value >= min && value <= max && (!integer || Number.isInteger(value)));
}

/** Return the stored settings; missing and invalid ones are the defaults, and without any storage `otherwise`. */
export function readSettings(otherwise = null) {
  const settings = defaults();
  let text = null;
  try {
    text = localStorage.getItem(KEY);
  } catch { /* storage is forbidden */ }
  if (text === null) return { ...(otherwise ?? settings) };
  try {
    const stored = JSON.parse(text) ?? {};
    if (typeof stored.system === "string") settings.system = stored.system;
    if (typeof stored.schema === "string" && !schemaProblem(stored.schema)) settings.schema = stored.schema;
    settings.think = stored.think === true;
    for (const field of fields) {
      if (field.name in stored && isAllowed(field, stored[field.name])) settings[field.name] = stored[field.name];
    }
  } catch { /* it cannot be read */ }
  return settings;
}

function store(settings) {
  try {
    localStorage.setItem(KEY, JSON.stringify(settings));
  } catch { /* storage is forbidden: they last until the page is closed */ }
}

/** Return the settings of a chat request; `schema` is the JSON Schema that the reply keeps to, if there is one. */
export function chatSettings(settings) {
  const { system, context, schema, ...chat } = settings;
  return schema.trim() ? { ...chat, schema: JSON.parse(schema) } : chat;
}

function numberField({ name, label, min, max, integer, help, empty = t("default") }) {
  const input = element("input");
  Object.assign(input, { type: "number", name, min, max, step: integer ? 1 : "any", placeholder: empty });
  return element("label", "", label, input, element("small", "", help));
}

/** The dialog; calls `changed(settings, before)` when the settings are saved here. Other tabs' settings are followed. */
export class SettingsDialog {
  constructor(settings, changed) {
    this.settings = settings;
    this.changed = changed;
    this.dialog = byId("settings-dialog");
    this.form = byId("settings-form");
    byId("number-fields").append(...fields.map(numberField));
    this.schema = this.form.elements.schema;
    this.schema.addEventListener("input", () => this.schema.ariaInvalid && this.checkSchema()); // until it is right
    byId("settings-button").addEventListener("click", () => this.open());
    byId("settings-reset").addEventListener("click", () => this.fill(defaults()));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
    addEventListener("storage", ({ key }) => {
      if (key === KEY || key === null) this.follow();
    });
  }

  open() {
    this.fill(this.settings);
    this.filled = this.entries(); // to see what the user changes
    this.dialog.showModal();
  }

  /** Take over what another tab has saved, except what the user has changed in the open dialog. */
  follow() {
    this.settings = readSettings();
    if (!this.dialog.open) return;
    const changed = this.changes();
    this.fill(this.settings);
    this.filled = this.entries();
    for (const [name, value] of Object.entries(changed)) this.fillField(name, value);
  }

  fill(settings) {
    for (const name of this.names) this.fillField(name, settings[name] ?? "");
    this.showProblem("");
    this.checkSchema();
  }

  fillField(name, value) {
    this.form.elements[name][name === "think" ? "checked" : "value"] = value;
  }

  get names() {
    return ["system", "schema", "think", ...fields.map(({ name }) => name)];
  }

  /** Return what the fields contain. */
  entries() {
    const { elements } = this.form;
    return Object.fromEntries(this.names.map((name) => [name, name === "think" ? elements.think.checked : elements[name].value]));
  }

  /** Return those entries that the user has changed since the fields were filled. */
  changes() {
    return Object.fromEntries(Object.entries(this.entries()).filter(([name, value]) => value !== this.filled[name]));
  }

  /** Show what is wrong with the schema, if anything, below its box; return whether it can be used. */
  checkSchema() {
    const problem = schemaProblem(this.schema.value);
    byId("schema-problem").textContent = problem;
    this.schema.ariaInvalid = problem ? "true" : null;
    return !problem;
  }

  showProblem(message) {
    byId("settings-problem").textContent = message;
  }

  save() {
    const { elements } = this.form;
    const changes = this.changes();
    const before = this.settings;
    const settings = readSettings(before); // only the changes are saved: another tab may have saved others
    if ("system" in changes) settings.system = changes.system;
    if ("schema" in changes) settings.schema = changes.schema.trim();
    if (!this.checkSchema()) {
      this.schema.focus();
      return;
    }
    if ("think" in changes) settings.think = changes.think;
    for (const field of fields) {
      const input = elements[field.name];
      if (!(field.name in changes) && !input.validity.badInput) continue;
      const value = input.value === "" ? null : input.valueAsNumber;
      if (input.validity.badInput || !isAllowed(field, value)) {
        this.showProblem(field.integer
          ? t("{field} must be a whole number from {min} to {max}, or empty.", { field: field.label, min: field.min, max: field.max })
          : t("{field} must be a number from {min} to {max}, or empty.", { field: field.label, min: field.min, max: field.max }));
        input.focus();
        return;
      }
      settings[field.name] = value;
    }
    this.settings = settings;
    store(settings);
    this.dialog.close();
    this.changed(settings, before);
  }
}
