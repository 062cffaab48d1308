// Presets: named sets of a system prompt and settings, those of the page and those that the user has saved, which are
// in localStorage as [{id, name, values}]. What a preset leaves out is the model's default.

import { randomId } from "./dom.js";
import { language, LANGUAGE_NAMES, t } from "./language.js";
import { scoped } from "./scope.js";

const KEY = scoped("webgemma.presets");

const named = (id, name, values) => ({ id, name, values });

/** The presets that come with the page. */
export const PRESETS = [
  named("precise", t("Precise"), {
    temperature: 0.2, top_p: 0.9,
    system: t("Answer precisely and only with what you are sure of. Say so when you do not know something."),
  }),
  named("creative", t("Creative"), {
    temperature: 1.3, top_p: 0.98,
    system: t("Write vividly and in your own words. Prefer the surprising to the obvious."),
  }),
  named("brief", t("Brief"), {
    system: t("Answer in at most three short sentences, without an introduction or a summary."),
  }),
  named("step-by-step", t("Step by step"), {
    think: true, temperature: 0.6,
    system: t("Solve the task step by step, check the result, and end with the answer alone on the last line."),
  }),
  named("teacher", t("Teacher"), {
    system: t("Explain simply, as to a beginner, with one example from everyday life. End with a question that checks the understanding."),
  }),
  named("translator", t("Translator into {language}", { language: LANGUAGE_NAMES[language] }), {
    temperature: 0.3,
    system: t("Translate every message into {language}. Reply with the translation alone, and keep the tone and the layout.", {
      language: LANGUAGE_NAMES[language],
    }),
  }),
];

/** The user's own presets; those that another tab stores are read again. `check(values)` returns what is valid of values. */
export class OwnPresets extends EventTarget {
  constructor(check) {
    super();
    this.check = check;
    this.list = this.read();
    addEventListener("storage", ({ key }) => {
      if (key !== KEY && key !== null) return;
      this.list = this.read();
      this.dispatchEvent(new Event("change"));
    });
  }

  read() {
    try {
      const stored = JSON.parse(localStorage.getItem(KEY)) ?? [];
      const isPreset = (entry) => [entry?.id, entry?.name].every((text) => typeof text === "string" && text);
      return stored.filter(isPreset).map(({ id, name, values }) => named(id, name, this.check(values)));
    } catch {
      return []; // none, or they cannot be read
    }
  }

  /** Change the list as it is stored now; return whether it is stored. */
  change(act) {
    this.list = act(this.read());
    try {
      localStorage.setItem(KEY, JSON.stringify(this.list));
      return true;
    } catch {
      return false; // storage is forbidden or full: it lasts until the page is closed
    }
  }

  /** Save values under a name, in place of a preset of that name; return the preset. */
  save(name, values) {
    const same = this.list.find((preset) => preset.name === name);
    const preset = named(same?.id ?? randomId(), name, values);
    this.change((list) => [...list.filter(({ id }) => id !== preset.id), preset].sort((a, b) => a.name.localeCompare(b.name)));
    return preset;
  }

  rename(id, name) {
    this.change((list) => list.map((preset) => (preset.id === id ? { ...preset, name } : preset)));
  }

  remove(id) {
    this.change((list) => list.filter((preset) => preset.id !== id));
  }
}
