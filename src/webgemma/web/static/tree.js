// A conversation is a tree of messages: {id, title, created, updated, titled, pinned, unpinned, deleted, restored, leaf,
// tools?, tooled?, settings?, messages: Map by id}; `titled` and the four after it are the times of what was done last,
// 0: never; tools: the names of those that are on, tooled: since when; settings: its own, see settings.js. Each message
// {id, parent, created, role, content, …} names the one before it (null: none); messages with the same parent are
// versions of each other. Nothing is ever replaced, so what several tabs write is merged by adding it.

import { t } from "./language.js";

const TITLE_LENGTH = 48;
const byTime = (a, b) => a.created - b.created || (a.id < b.id ? -1 : 1);

/** Return a title: the first words of a text. */
export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  if (line.length <= TITLE_LENGTH) return line || t("New conversation");
  const cut = line.slice(0, TITLE_LENGTH);
  return `${cut.slice(0, Math.max(cut.lastIndexOf(" "), TITLE_LENGTH / 2)).trimEnd()} …`;
}

/** The times of a conversation that was never pinned or deleted; tabs merge theirs by taking the latest. */
export const NEVER = { pinned: 0, unpinned: 0, deleted: 0, restored: 0 };

/** Return an empty conversation. */
export function emptyConversation(id) {
  const now = Date.now();
  return { id, title: titleOf(""), created: now, updated: now, titled: 0, ...NEVER, leaf: null, messages: new Map() };
}

export const isPinned = ({ pinned, unpinned }) => pinned > unpinned;

/** Whether a conversation was deleted and not restored: for a while it is still stored. */
export const isDeleted = ({ deleted, restored }) => deleted > restored;

/** Note that something is done to a conversation now, which its opposite was done to before. */
export function mark(conversation, done, opposite) {
  conversation[done] = Math.max(Date.now(), conversation[opposite] + 1);
}

/** Return the messages that follow each message, by its id (null: those that open the conversation), the oldest first. */
export function childrenOf({ messages }) {
  const children = new Map();
  for (const message of messages.values()) {
    const parent = messages.has(message.parent) ? message.parent : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(message);
  }
  for (const versions of children.values()) versions.sort(byTime);
  return children;
}

/** Return the messages up to one. */
export function pathTo({ messages }, id) {
  const path = [];
  for (let message = messages.get(id); message; message = messages.get(message.parent)) path.push(message);
  return path.reverse();
}

/** Return the messages that are shown: those up to `leaf`, then the newest of those that follow. */
export function pathOf(conversation, children = childrenOf(conversation)) {
  const path = pathTo(conversation, conversation.leaf);
  for (;;) {
    const next = children.get(path.at(-1)?.id ?? null)?.at(-1);
    if (!next) return path;
    path.push(next);
  }
}

/** Return all messages, each after its parent. */
export function inOrder(conversation) {
  const children = childrenOf(conversation);
  const messages = [...(children.get(null) ?? [])];
  for (const { id } of messages) messages.push(...(children.get(id) ?? [])); // the loop also visits these
  return messages;
}

/** Return a conversation of the older form, in which `messages` is a list without versions. */
export function fromList({ messages, ...facts }) {
  const entries = messages.map((message, i) =>
    [String(i), { id: String(i), parent: i ? String(i - 1) : null, created: facts.created + i, ...message }]);
  return { ...facts, titled: 0, ...NEVER, leaf: entries.at(-1)?.[0] ?? null, messages: new Map(entries) };
}

/** Return all attachments of a conversation; versions of a message may share some. */
export const attachmentsOf = ({ messages }) =>
  [...new Map([...messages.values()].flatMap(({ attachments }) => attachments ?? []).map((each) => [each.id, each])).values()];
