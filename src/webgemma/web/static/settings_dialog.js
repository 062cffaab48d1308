// The dialog of the settings, for all conversations or for the one that is shown, with presets; and the switch at the
// message box that lets the model think.

import { byId, element } from "./dom.js";
import { schemaProblem } from "./json.js";
import { t } from "./language.js";
import { OwnPresets, PRESETS } from "./presets.js";
import { askLine, confirmed } from "./question.js";
import {
  checked, defaults, fields, followSettings, isAllowed, ownValues, readSettings, storeSettings,
} from "./settings.js";

const ALL = "all"; // the settings of all conversations,
const OWN = "own"; // or those of the conversation that is shown

function numberField({ name, label, min, max, integer, help, empty = t("default"), ofModel = false }) {
  const input = element("input");
  Object.assign(input, { type: "number", name, min, max, step: integer ? 1 : "any", placeholder: empty });
  const field = element("label", "", label, input, element("small", "", help));
  if (ofModel) field.dataset.ofModel = "";
  return field;
}

/**
 * The dialog. `actions` has changed(settings, before), called when the settings for all conversations are saved here;
 * conversation(), the one that is shown; and saveOwn(conversation, values). Other tabs' settings are followed.
 */
export class SettingsDialog {
  constructor(settings, actions) {
    this.settings = settings; // for all conversations
    this.actions = actions;
    this.dialog = byId("settings-dialog");
    this.form = byId("settings-form");
    byId("number-fields").append(...fields.map(numberField));
    this.schema = this.form.elements.schema;
    this.presets = new OwnPresets(checked);
    this.addListeners();
  }

  addListeners() {
    this.schema.addEventListener("input", () => this.schema.ariaInvalid && this.checkSchema()); // until it is right
    byId("settings-button").addEventListener("click", () => this.open());
    byId("settings-reset").addEventListener("click", () => this.fill(this.scope === OWN ? this.settings : defaults()));
    for (const choice of this.form.elements.scope) choice.addEventListener("change", () => this.changeScope());
    byId("preset").addEventListener("change", () => this.choosePreset());
    byId("preset-save").addEventListener("click", () => this.savePreset());
    byId("preset-rename").addEventListener("click", () => this.renamePreset());
    byId("preset-delete").addEventListener("click", () => this.deletePreset());
    this.presets.addEventListener("change", () => this.showPreset());
    this.form.addEventListener("input", ({ target }) => this.names.includes(target.name) && this.showPreset());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
    byId("think").addEventListener("click", () => this.switchThinking());
    followSettings(() => {
      this.settings = readSettings();
      this.follow();
    });
  }

  /** Return the settings that hold in a conversation. */
  of(conversation) {
    return { ...this.settings, ...ownValues(conversation) };
  }

  /** Whether a conversation has settings of its own, besides thinking, which the switch shows. */
  hasOwn(conversation) {
    return Object.keys(ownValues(conversation)).some((name) => name !== "think");
  }

  /** What is edited: the settings for all conversations, or those of the one that is shown. */
  get scope() {
    return this.form.elements.scope.value;
  }

  /** The settings of what is edited, as they are saved. */
  get saved() {
    return this.scope === OWN ? this.of(this.conversation) : this.settings;
  }

  open() {
    this.conversation = this.actions.conversation();
    this.form.elements.scope.value = this.hasOwn(this.conversation) ? OWN : ALL;
    this.refill({});
    this.dialog.showModal();
  }

  /** Fill in what is saved, except what the user has changed. */
  refill(changes) {
    for (const field of this.form.querySelectorAll("[data-of-model]")) field.hidden = this.scope === OWN;
    this.fill(this.saved);
    this.filled = this.entries();
    for (const [name, value] of Object.entries(changes)) this.fillField(name, value);
    this.showPreset();
  }

  changeScope() {
    this.refill(this.changes());
  }

  /** Show what has been saved elsewhere, or that another conversation is shown. `canThink`: the model can. */
  follow(canThink = !byId("think").hidden) {
    const shown = this.actions.conversation();
    byId("think").hidden = !canThink;
    byId("think").ariaPressed = String(this.of(shown).think);
    byId("settings-button").classList.toggle("own", this.hasOwn(shown));
    byId("settings-button").title = this.hasOwn(shown) ? t("This conversation has settings of its own") : "";
    if (!this.dialog.open) return;
    if (this.conversation !== shown) {
      this.dialog.close(); // another tab has deleted the conversation
      return;
    }
    const saved = JSON.stringify(this.saved);
    if (saved !== this.filledWith) this.refill(this.changes());
  }

  fill(settings) {
    this.filledWith = JSON.stringify(settings);
    for (const name of this.names) this.fillField(name, settings[name] ?? "");
    this.showProblem("");
    this.checkSchema();
    this.showPreset();
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

  /** Show what is wrong with the field of a number, below it; "": nothing is. */
  showProblem(message, input = null) {
    const problem = byId("settings-problem");
    for (const { name } of fields) this.form.elements[name].ariaInvalid = input?.name === name ? "true" : null;
    input?.closest("label").after(problem);
    problem.textContent = message;
  }

  /** Return the values of these entries; null, and show why, if one cannot be used. */
  read(names) {
    const { elements } = this.form;
    if (!this.checkSchema()) {
      this.schema.focus();
      return null;
    }
    const values = {};
    if (names.includes("system")) values.system = elements.system.value;
    if (names.includes("schema")) values.schema = elements.schema.value.trim();
    if (names.includes("think")) values.think = elements.think.checked;
    for (const field of fields) {
      const { name, label, min, max, integer } = field;
      const input = elements[name];
      if (!names.includes(name) && !input.validity.badInput) continue;
      const value = input.value === "" ? null : input.valueAsNumber;
      if (input.validity.badInput || !isAllowed(field, value)) {
        this.showProblem(integer
          ? t("{field} must be a whole number from {min} to {max}, or empty.", { field: label, min, max })
          : t("{field} must be a number from {min} to {max}, or empty.", { field: label, min, max }), input);
        input.focus();
        return null;
      }
      values[name] = value;
    }
    return values;
  }

  save() {
    const values = this.read(Object.keys(this.changes()));
    if (!values) return;
    if (this.scope === OWN) this.saveOwn(this.conversation, values);
    else this.saveAll(values);
    this.dialog.close();
  }

  saveAll(values) {
    const before = this.settings;
    this.settings = { ...readSettings(before), ...values }; // only the changes: another tab may have saved others
    storeSettings(this.settings);
    this.actions.changed(this.settings, before);
  }

  /** Give a conversation these settings; what does not differ from those of all conversations follows them. */
  saveOwn(conversation, values) {
    const own = Object.entries({ ...ownValues(conversation), ...values }).filter(([name, value]) => value !== this.settings[name]);
    this.actions.saveOwn(conversation, Object.fromEntries(own));
  }

  switchThinking() {
    const conversation = this.actions.conversation();
    this.saveOwn(conversation, { think: !this.of(conversation).think });
  }

  // Presets

  get allPresets() {
    return [...PRESETS, ...this.presets.list];
  }

  /** List the presets, and show which one the fields contain, if any. */
  showPreset() {
    const group = (label, presets) => {
      const node = element("optgroup", "", presets.map(({ id, name }) => new Option(name, id)));
      node.label = label;
      return node;
    };
    const own = this.presets.list;
    const groups = [group(t("Of this page"), PRESETS), ...(own.length ? [group(t("My presets"), own)] : [])];
    byId("preset").replaceChildren(new Option(t("None"), ""), ...groups);
    const content = JSON.stringify(this.presetEntries(this.entries()));
    const preset = this.allPresets.find(({ values }) => JSON.stringify(this.presetEntries(this.asEntries(values))) === content);
    byId("preset").value = preset?.id ?? "";
    const isOwn = own.includes(preset);
    byId("preset-rename").hidden = !isOwn;
    byId("preset-delete").hidden = !isOwn;
    const empty = JSON.stringify(this.presetEntries(this.asEntries({})));
    byId("preset-save").hidden = Boolean(preset) || content === empty;
  }

  /** Return the fields' contents for some values; what they leave out is the model's default. */
  asEntries(values) {
    const entries = Object.entries({ ...defaults(), ...values });
    return Object.fromEntries(entries.map(([name, value]) => [name, typeof value === "boolean" ? value : String(value ?? "")]));
  }

  /** Return those entries that a preset has, in their order. */
  presetEntries(entries) {
    return this.names.filter((name) => !fields.some((each) => each.ofModel && each.name === name)).map((name) => entries[name]);
  }

  choosePreset() {
    const preset = this.allPresets.find(({ id }) => id === byId("preset").value);
    const entries = this.asEntries(preset?.values ?? {});
    for (const field of fields) if (field.ofModel) delete entries[field.name];
    for (const [name, value] of Object.entries(entries)) this.fillField(name, value);
    this.showProblem("");
    this.checkSchema();
    this.showPreset();
  }

  async savePreset() {
    const values = this.read(this.names);
    if (!values) return;
    const name = (await askLine(t("Name of the preset"), t("Save"), "", t("Name")))?.trim();
    if (!name) return;
    const given = Object.entries(checked(values)).filter(([key, value]) => value !== defaults()[key]);
    this.presets.save(name, Object.fromEntries(given));
    this.showPreset();
    byId("preset").focus();
  }

  get chosenPreset() {
    return this.presets.list.find(({ id }) => id === byId("preset").value);
  }

  async renamePreset() {
    const { id, name } = this.chosenPreset;
    const renamed = (await askLine(t("Name of the preset"), t("Rename"), name, t("Name")))?.trim();
    if (renamed) this.presets.rename(id, renamed);
    this.showPreset();
  }

  async deletePreset() {
    const { id, name } = this.chosenPreset;
    if (!await confirmed(t("Delete the preset {name}?", { name }), t("Delete"))) return;
    this.presets.remove(id);
    this.showPreset();
    byId("preset").focus();
  }
}
