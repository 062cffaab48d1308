// Export and import of conversations as a JSON file; an import is checked completely before any of it is used.

import { exportAttachment, importAttachment } from "./attachments.js";
import { attachmentsOf, withAttachments } from "./conversations.js";

const FORMAT = "webgemma-conversations";
const VERSION = 1;
const MAX_NBYTES = 500e6; // about what browsers can hold in one string
const ROLES = ["user", "assistant"];
const FINISHES = ["stop", "length", "stopped", "error"];

/** Return all conversations as a file; throw an Error with a message for the user. */
export async function exportFile(conversations) {
  const texts = [];
  let nbytes = 0;
  for (const conversation of conversations) {
    const files = new Map();
    for (const file of attachmentsOf(conversation)) files.set(file.id, await exportAttachment(file));
    texts.push(JSON.stringify(withAttachments(conversation, ({ id }) => files.get(id)), null, 1));
    nbytes += texts.at(-1).length;
    if (nbytes > MAX_NBYTES) throw new Error("These conversations have more images and audio than one file can hold: delete some first.");
  }
  const head = { format: FORMAT, version: VERSION, exported: new Date().toISOString() };
  const opening = JSON.stringify(head).slice(0, -1);
  return new Blob([opening, ',"conversations":[', texts.join(","), "]}"], { type: "application/json" });
}

/**
 * Return those conversations of an exported file that are not in `known` (a map by id); throw an Error
 * with a message for the user.
 */
export async function importFile(file, known) {
  const refuse = (reason) => {
    throw new Error(`${file.name} was not imported: ${reason} Your conversations are unchanged.`);
  };
  if (file.size > MAX_NBYTES) refuse("it is too large to be an export of this page.");
  let data;
  try {
    data = JSON.parse(await file.text());
  } catch {
    refuse("it is not JSON. Choose a file that Export has saved.");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    refuse("it holds no conversations of this page. Choose a file that Export has saved.");
  }
  if (data.version !== VERSION) refuse("it comes from another version of this page.");
  const checked = data.conversations.map((entry, i) => {
    const problem = conversationProblem(entry);
    if (problem) refuse(`conversation ${i + 1} ${problem}.`);
    const conversation = withAttachments(onlyKnownFields(entry), importAttachment);
    if (attachmentsOf(conversation).includes(null)) refuse(`conversation ${i + 1} has an image or audio that cannot be read.`);
    return conversation;
  });
  return withoutKnown(checked, known);
}

/** Return what is wrong with a conversation of a file, or null. */
function conversationProblem(entry) {
  if (typeof entry !== "object" || entry === null) return "is not a JSON object";
  if (typeof entry.id !== "string" || !entry.id) return "has no id";
  if (typeof entry.title !== "string" || !entry.title.trim()) return "has no title";
  if (![entry.created, entry.updated].every(Number.isFinite)) return "has no dates";
  if (!Array.isArray(entry.messages)) return "has no messages";
  const wrong = entry.messages.findIndex((message) =>
    !ROLES.includes(message?.role) || typeof message.content !== "string"
    || !["string", "undefined"].includes(typeof message.thinking)
    || !(message.attachments === undefined || Array.isArray(message.attachments)));
  return wrong >= 0 ? `has a message (number ${wrong + 1}) that cannot be read` : null;
}

function onlyKnownFields({ id, title, created, updated, messages }) {
  return { id, title, created, updated, messages: messages.map(messageFields) };
}

function messageFields({ role, content, attachments, thinking, finish, tokens, tokens_per_second }) {
  const message = { role, content };
  if (attachments?.length) message.attachments = attachments;
  if (thinking) message.thinking = thinking;
  if (FINISHES.includes(finish)) message.finish = finish;
  if (Number.isFinite(tokens)) message.tokens = tokens;
  if (Number.isFinite(tokens_per_second)) message.tokens_per_second = tokens_per_second;
  return message;
}

/** Return a text that differs between versions of a conversation; the file of an attachment never changes. */
const fingerprint = (conversation) => JSON.stringify(withAttachments(onlyKnownFields(conversation), ({ id }) => id));

/** Leave out conversations that are known; others with a known id get another id, so that nothing is overwritten. */
function withoutKnown(conversations, known) {
  const taken = new Set([...known.values()].flatMap((conversation) => [conversation, ...attachmentsOf(conversation)]).map(({ id }) => id));
  const withFreeId = (item) => {
    const id = taken.has(item.id) ? crypto.randomUUID() : item.id;
    taken.add(id);
    return { ...item, id };
  };
  const added = conversations.filter((conversation) => {
    const existing = known.get(conversation.id);
    return !existing || fingerprint(existing) !== fingerprint(conversation);
  });
  return added.map((conversation) => withFreeId(withAttachments(conversation, withFreeId)));
}
