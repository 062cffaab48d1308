// Export and import of conversations as a JSON file; an import is checked completely before any of it is used.

import { attachmentFacts, exportFileData, fileBlob, isAttachment } from "./attachments.js";
import { checkedPassages } from "./citations.js";
import { randomId } from "./dom.js";
import { t } from "./language.js";
import { areRounds, isDuration, roundsFields } from "./rounds.js";
import { isRecord } from "./settings.js";
import { attachmentsOf, emptyConversation, fromList, inOrder, isPinned } from "./tree.js";

const FORMAT = "webgemma-conversations";
const VERSION = 2; // in version 1, messages are a list without versions, with the files inside
const MAX_NBYTES = 500e6; // about what browsers can hold in one string
const ROLES = ["user", "assistant"];
const FINISHES = ["stop", "length", "stopped", "error", "unfinished"];
const USAGE = ["prompt", "reply", "context", "left_out"];
const MAX_TIME = 8.64e15; // of JavaScript's dates

/** Return all conversations as a file; throw an Error with a message for the user. */
export async function exportFile(conversations) {
  const texts = [];
  let nbytes = 0;
  for (const conversation of conversations) {
    const { id, title, created, updated, leaf, settings } = conversation;
    const pinned = isPinned(conversation) || undefined; // and then JSON has no such field
    const files = [];
    for (const file of attachmentsOf(conversation)) files.push(await exportFileData(file));
    texts.push(JSON.stringify({ id, title, created, updated, pinned, leaf, settings, messages: inOrder(conversation).map(messageFields), files }, null, 1));
    nbytes += texts.at(-1).length;
    if (nbytes > MAX_NBYTES) throw new Error(t("These conversations have more images and audio than one file can hold: delete some first."));
  }
  const head = { format: FORMAT, version: VERSION, exported: new Date().toISOString() };
  const opening = JSON.stringify(head).slice(0, -1);
  return new Blob([opening, ',"conversations":[', texts.join(","), "]}"], { type: "application/json" });
}

/**
 * Return those conversations of an exported file that are not in `known` (a map by id), with other ids than those in
 * `known` and `trash`; throw an Error with a message for the user.
 */
export async function importFile(file, known, trash = new Map()) {
  const refuse = (reason) => {
    throw new Error(t("{file} was not imported: {reason} Your conversations are unchanged.", { file: file.name, reason }));
  };
  if (file.size > MAX_NBYTES) refuse(t("it is too large to be an export of this page."));
  let data;
  try {
    data = JSON.parse(await file.text());
  } catch {
    refuse(t("it is not JSON. Choose a file that Export has saved."));
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    refuse(t("it holds no conversations of this page. Choose a file that Export has saved."));
  }
  if (![1, VERSION].includes(data.version)) refuse(t("it comes from another version of this page."));
  const checked = data.conversations.map((entry, i) => {
    const number = i + 1;
    const problem = conversationProblem(entry, number) ?? (data.version === 1 ? null : treeProblem(entry, number));
    if (problem) refuse(problem);
    const conversation = data.version === 1 ? withInnerFiles(entry) : withFiles(entry);
    if (!conversation) refuse(t("conversation {number} has an image or audio that cannot be read.", { number }));
    const now = Date.now();
    conversation.updated = Math.min(conversation.updated, now); // else it would stay the first for ever
    if (entry.pinned === true) conversation.pinned = now;
    return conversation;
  });
  return withoutKnown(checked, known, trash);
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isTextOrNone = (value) => ["string", "undefined"].includes(typeof value);
const isCount = (value) => Number.isSafeInteger(value) && value >= 0;

const isTime = (value) => Number.isFinite(value) && Math.abs(value) <= MAX_TIME;

/** Return what is wrong with a conversation of a file, or null. */
function conversationProblem(entry, number) {
  if (!isObject(entry)) return t("conversation {number} is not a JSON object.", { number });
  if (typeof entry.id !== "string" || !entry.id) return t("conversation {number} has no id.", { number });
  if (typeof entry.title !== "string" || !entry.title.trim()) return t("conversation {number} has no title.", { number });
  if (![entry.created, entry.updated].every(isTime)) return t("conversation {number} has no dates.", { number });
  if (entry.settings !== undefined && !isRecord(entry.settings)) return t("conversation {number} has settings that cannot be read.", { number });
  if (!Array.isArray(entry.messages)) return t("conversation {number} has no messages.", { number });
  const wrong = entry.messages.findIndex((message) => !isMessage(message));
  return wrong >= 0 ? t("conversation {number} has a message (number {message}) that cannot be read.", { number, message: wrong + 1 }) : null;
}

function isMessage(message) {
  if (!isObject(message) || !ROLES.includes(message.role) || typeof message.content !== "string") return false;
  const { thinking, model, attachments = [], tool_calls: calls = [], rounds = [] } = message;
  return [thinking, model].every(isTextOrNone) && [attachments, calls].every(Array.isArray) && areRounds(rounds)
    && calls.every((call) => isObject(call) && typeof call.name === "string" && isObject(call.arguments));
}

/** Return what is wrong with the versions of a conversation's messages, or null. */
function treeProblem({ messages }, number) {
  const ids = new Set([null]);
  for (const [i, { id, parent, created }] of messages.entries()) {
    const at = { number, message: i + 1 };
    if (typeof id !== "string" || !id || ids.has(id)) return t("conversation {number} has a message (number {message}) without an id of its own.", at);
    if (!ids.has(parent)) return t("conversation {number} has a message (number {message}) that follows none before it.", at);
    if (!isTime(created)) return t("conversation {number} has a message (number {message}) without a date.", at);
    ids.add(id);
  }
  return null;
}

/** Return the fields of a message that an exported file holds. */
function messageFields({ id, parent, created, role, content, attachments, thinking, thinking_seconds: seconds, passages, rounds, tool_calls: calls, model, format, finish, tokens, tokens_per_second, usage }) {
  const message = { id, parent, created, role, content };
  if (attachments?.length) message.attachments = attachments.map(({ id: file }) => file);
  if (thinking) message.thinking = thinking;
  if (rounds?.length) message.rounds = roundsFields(rounds);
  if (thinking && isDuration(seconds)) message.thinking_seconds = seconds;
  if (role === "assistant" && checkedPassages(passages)) message.passages = checkedPassages(passages);
  if (calls?.length) message.tool_calls = calls.map(({ name, arguments: given }) => ({ name, arguments: given }));
  if (model) message.model = model;
  if (format === "json") message.format = format;
  if (FINISHES.includes(finish)) message.finish = finish;
  if (Number.isFinite(tokens)) message.tokens = tokens;
  if (Number.isFinite(tokens_per_second)) message.tokens_per_second = tokens_per_second;
  if (usage && USAGE.every((name) => isCount(usage[name]))) message.usage = Object.fromEntries(USAGE.map((name) => [name, usage[name]]));
  return message;
}

/** Return a checked conversation of version 2, or null if a file of it cannot be read. */
function withFiles({ id, title, created, updated, leaf, settings, messages, files = [] }) {
  if (!Array.isArray(files) || !files.every(isAttachment)) return null;
  const attachments = new Map(files.map((file) => [file.id, withBlob(file)]));
  const entries = messages.map((message) => {
    const fields = messageFields({ ...message, attachments: message.attachments?.map((file) => ({ id: file })) });
    if (fields.attachments) fields.attachments = fields.attachments.map((file) => attachments.get(file) ?? null);
    return [fields.id, fields];
  });
  const conversation = { ...emptyConversation(id), title, created, updated, messages: new Map(entries) };
  if (conversation.messages.has(leaf)) conversation.leaf = leaf;
  if (settings) conversation.settings = { changed: settings.changed, values: settings.values };
  return hasAllFiles(conversation) ? conversation : null;
}

/** Return a checked conversation of version 1, or null if a file of it cannot be read. */
function withInnerFiles({ id, title, created, updated, messages }) {
  const fields = messages.map((message) => {
    const { id: _, parent, created: __, ...known } = messageFields({ ...message, attachments: [] });
    if (message.attachments?.length) known.attachments = message.attachments.map((file) => (isAttachment(file) ? withBlob(file) : null));
    return known;
  });
  const conversation = fromList({ id, title, created, updated, messages: fields });
  return hasAllFiles(conversation) ? conversation : null;
}

/** Return an attachment of a file, or null if its data is not valid. */
function withBlob({ data, ...facts }) {
  const blob = data === null ? null : fileBlob(data, facts.kind);
  return blob === undefined ? null : { ...attachmentFacts(facts), blob };
}

const hasAllFiles = ({ messages }) => [...messages.values()].every(({ attachments = [] }) => !attachments.includes(null));

/** Whether every message of a conversation is in another one; the file of an attachment never changes. */
function isPartOf(conversation, other) {
  return [...conversation.messages.values()].every((message) => {
    const same = other.messages.get(message.id);
    return same && textOf(same) === textOf(message);
  });
}

const textOf = ({ parent, role, content, thinking = "", rounds = [], attachments = [] }) =>
  JSON.stringify([parent, role, content, thinking, roundsFields(rounds), attachments.map(({ id }) => id)]);

/** Leave out conversations that are known; others with a known id get another id, so that nothing is overwritten. */
function withoutKnown(conversations, known, trash) {
  const taken = new Set([...known.values(), ...trash.values()].flatMap((conversation) => [conversation, ...attachmentsOf(conversation)]).map(({ id }) => id));
  const withFreeId = (item) => {
    const id = taken.has(item.id) ? randomId() : item.id;
    taken.add(id);
    return { ...item, id };
  };
  const added = conversations.filter((conversation) => {
    const existing = known.get(conversation.id);
    return !existing || !isPartOf(conversation, existing);
  });
  return added.map((conversation) => {
    const files = new Map(); // versions of a message share files
    for (const message of conversation.messages.values()) {
      message.attachments = message.attachments?.map((file) => {
        if (!files.has(file)) files.set(file, withFreeId(file));
        return files.get(file);
      });
      if (!message.attachments) delete message.attachments;
    }
    return withFreeId(conversation);
  });
}
