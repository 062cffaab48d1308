// Conversations as a JSON file, out and in again; what comes in is checked whole before any is taken.

const FORMAT = "webgemma-conversations";
const VERSION = 1;
const NBYTES_LIMIT = 256e6;
const ROLES = ["user", "assistant"];
const FINISHES = ["stop", "length", "stopped", "error"];

/** All conversations as text. */
export function exportText(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, exported: new Date().toISOString(), conversations }, null, 1);
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
    return onlyKnownFields(entry);
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
    || !["string", "undefined"].includes(typeof message.thinking));
  return wrong >= 0 ? `has a message (number ${wrong + 1}) that cannot be read` : null;
}

function onlyKnownFields({ id, title, created, updated, messages }) {
  return { id, title, created, updated, messages: messages.map(messageFields) };
}

function messageFields({ role, content, thinking, finish, tokens, tokens_per_second }) {
  const message = { role, content };
  if (thinking) message.thinking = thinking;
  if (FINISHES.includes(finish)) message.finish = finish;
  if (Number.isFinite(tokens)) message.tokens = tokens;
  if (Number.isFinite(tokens_per_second)) message.tokens_per_second = tokens_per_second;
  return message;
}

/** Leave out what is here already; what differs under a known id gets a new one, so nothing is lost. */
function withoutKnown(conversations, known) {
  const taken = new Set(known.keys());
  const fresh = [];
  for (const conversation of conversations) {
    const here = known.get(conversation.id);
    if (here && JSON.stringify(onlyKnownFields(here)) === JSON.stringify(conversation)) continue;
    const id = taken.has(conversation.id) ? crypto.randomUUID() : conversation.id;
    taken.add(id);
    fresh.push({ ...conversation, id });
  }
  return fresh;
}
