// The settings. Those for all conversations are in localStorage; a conversation may have some of its own, which are in
// its record as {changed, values}, with only what differs. A setting that is null is the model's default.
// The server lists the generation settings with their ranges, from webgemma/settings.py; a home may have more.

import { schemaProblem } from "./json.js";
import { t } from "./language.js";
import { scoped } from "./scope.js";

const KEY = scoped("webgemma.settings");
const PENDING = scoped("webgemma.new-settings"); // in sessionStorage: those of this tab's next conversation

/** The fields with a number; `ofModel`: it applies when a model is loaded, to all conversations. */
export let fields = [];

/** Fetch the generation settings; without them, there are those of the home only. */
export async function loadFields(ofHome) {
  const own = ofHome.map((each) => ({ ...each, ofModel: true }));
  fields = own;
  try {
    const response = await fetch("api/settings");
    if (response.ok) fields = [...(await response.json()).settings.map(field), ...own];
  } catch { /* the server does not respond, and nothing is cached */ }
}

/** Return a field of the server's list; its English label and help are keys of their translations. */
function field({ name, label, min, max, integer, help, random }) {
  return { name, label: t(label), min, max: Math.min(max ?? Infinity, Number.MAX_SAFE_INTEGER), integer, help: t(help), empty: random ? t("random") : t("default") };
}

/** Return the settings that leave everything to the model. */
export const defaults = () => ({
  system: "", schema: "", think: false, ...Object.fromEntries(fields.map(({ name }) => [name, null])),
});

/** Whether a field can have a value. */
export function isAllowed({ min, max, integer }, value) {
  return value === null
    || (typeof value === "number" && value >= min && value <= max && (!integer || Number.isInteger(value)));
}

/** Return those of some values, from wherever, that are valid settings; `isOwn`: of a conversation or a preset. */
export function checked(values, isOwn = true) {
  if (typeof values !== "object" || values === null) return {};
  const valid = {};
  if (typeof values.system === "string") valid.system = values.system;
  if (typeof values.schema === "string" && !schemaProblem(values.schema)) valid.schema = values.schema;
  if (typeof values.think === "boolean") valid.think = values.think;
  for (const field of fields) {
    const { name, ofModel } = field;
    if (!(isOwn && ofModel) && Object.hasOwn(values, name) && isAllowed(field, values[name])) valid[name] = values[name];
  }
  return valid;
}

/** Return the stored settings; missing and invalid ones are the defaults, and without any storage `otherwise`. */
export function readSettings(otherwise = null) {
  let text = null;
  try {
    text = localStorage.getItem(KEY);
  } catch { /* storage is forbidden */ }
  if (text === null) return { ...(otherwise ?? defaults()) };
  try {
    return { ...defaults(), ...checked(JSON.parse(text), false) };
  } catch {
    return defaults(); // it cannot be read
  }
}

export function storeSettings(settings) {
  try {
    localStorage.setItem(KEY, JSON.stringify(settings));
  } catch { /* storage is forbidden: they last until the page is closed */ }
}

/** Call `changed()` when another tab has stored settings. */
export function followSettings(changed) {
  addEventListener("storage", ({ key }) => {
    if (key === KEY || key === null) changed();
  });
}

/** Return the settings of a chat request; `schema` is the JSON Schema that the reply keeps to, if there is one. */
export function chatSettings(settings) {
  const { system, context, schema, ...chat } = settings;
  return schema.trim() ? { ...chat, schema: JSON.parse(schema) } : chat;
}

// Of a conversation

/** Whether a record, from wherever, can be the settings of a conversation. */
export const isRecord = (record) => Number.isSafeInteger(record?.changed) && record.changed >= 0
  && typeof record.values === "object" && record.values !== null && !Array.isArray(record.values);

/** Return the settings of its own that a conversation has. */
export const ownValues = (conversation) => checked(conversation?.settings?.values);

/** Give a conversation these settings of its own. */
export function setOwn(conversation, values) {
  conversation.settings = { changed: Math.max(Date.now(), (conversation.settings?.changed ?? 0) + 1), values };
}

/** Keep the settings of a conversation that is not stored, as it has no message, for a reload of this tab. */
export function keepPending({ id, settings }) {
  try {
    sessionStorage.setItem(PENDING, JSON.stringify({ id, settings }));
  } catch { /* storage is forbidden: a reload begins with the settings for all */ }
}

/** Return the settings that were kept for a conversation, or undefined. */
export function pendingSettings(conversationId) {
  try {
    const { id, settings } = JSON.parse(sessionStorage.getItem(PENDING));
    return id === conversationId && isRecord(settings) ? settings : undefined;
  } catch {
    return undefined; // none were kept
  }
}
