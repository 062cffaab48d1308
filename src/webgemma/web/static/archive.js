// Conversations as a JSON file, out and in again; what comes in is checked whole before any is taken.

import { exported, imported } from "./attachments.js";
import { attachmentsOf, withAttachments } from "./conversations.js";

const FORMAT = "webgemma-conversations";
const VERSION = 1;
const NBYTES_LIMIT = 500e6; // what browsers hold as one text
const ROLES = ["user", "assistant"];
const FINISHES = ["stop", "length", "stopped", "error"];

/** All conversations as a file; an Error has the sentence. */
export async function exportFile(conversations) {
  const parts = [];
  let nbytes = 0;
  for (const conversation of conversations) {
    const files = new Map();
    for (const file of attachmentsOf(conversation)) files.set(file.id, await exported(file));
    parts.push(JSON.stringify(withAttachments(conversation, ({ id }) => files.get(id)), null, 1));
    nbytes += parts.at(-1).length;
    if (nbytes > NBYTES_LIMIT) throw new Error("These conversations have more pictures and sounds than one file can hold: delete some first.");
  }
  const head = { format: FORMAT, version: VERSION, exported: new Date().toISOString() };
  const opening = JSON.stringify(head).slice(0, -1);
  return new Blob([opening, ',"conversations":[', parts.join(","), "]}"], { type: "application/json" });
}

/** The conversations of a file, as new as `known` (id to conversation) needs; an Error has the sentence. */
export async function importFile(file, known) {
  const refuse = (why) => {
    throw new Error(`${file.name} was not imported: ${why} Your conversations are as they were.`);
  };
  if (file.size > NBYTES_LIMIT) refuse("it is too large to be an export of this page.");
  let data;
  try {
    data = JSON.parse(await file.text());
  } catch {
    refuse("it is not JSON. Choose a file that Export has made.");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    refuse("it holds no conversations of this page. Choose a file that Export has made.");
  }
  if (data.version !== VERSION) refuse("it comes from another version of this page.");
  const checked = data.conversations.map((entry, i) => {
    const problem = conversationProblem(entry);
    if (problem) refuse(`conversation ${i + 1} ${problem}.`);
    const conversation = withAttachments(onlyKnownFields(entry), imported);
    if (attachmentsOf(conversation).includes(null)) refuse(`conversation ${i + 1} has a picture or a sound that cannot be read.`);
    return conversation;
  });
  return withoutKnown(checked, known);
}

function conversationProblem(entry) {
  if (typeof entry !== "object" || entry === null) return "is none";
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

/** What tells one version of a conversation from another; a file never changes. */
const fingerprint = (conversation) => JSON.stringify(withAttachments(onlyKnownFields(conversation), ({ id }) => id));

/** Leave out what is here already; what differs under a known id gets a new one, so nothing is lost. */
function withoutKnown(conversations, known) {
  const taken = new Set([...known.values()].flatMap((here) => [here, ...attachmentsOf(here)]).map(({ id }) => id));
  const withFreeId = (thing) => {
    const id = taken.has(thing.id) ? crypto.randomUUID() : thing.id;
    taken.add(id);
    return { ...thing, id };
  };
  const fresh = conversations.filter((conversation) => {
    const here = known.get(conversation.id);
    return !here || fingerprint(here) !== fingerprint(conversation);
  });
  return fresh.map((conversation) => withFreeId(withAttachments(conversation, withFreeId)));
}
