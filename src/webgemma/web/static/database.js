// The page's database, in IndexedDB: it holds far more than localStorage's 5 MB and does not block the page while a
// reply streams in. Every message is a record of its own, so that tabs do not overwrite each other's. Names of the
// database, its stores and fields are in users' browsers: they stay.

import { scoped } from "./scope.js";
import { fromList } from "./tree.js";

const NAME = scoped("webgemma");
const VERSION = 3;
export const HEADS = "conversations"; // {id, title, created, updated, titled, leaf}
export const MESSAGES = "messages"; // {conversation, id, parent, created, revision, role, content, …}
export const FILES = "attachments"; // {id, blob}
export const DRAFTS = "drafts"; // {id: of the conversation, text, attachments, updated}
export const ALL = [HEADS, MESSAGES, FILES, DRAFTS];

/** Return the result of a request. */
export const resultOf = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** Wait until a transaction is on disk: its requests succeed before that, and a full disk aborts it afterwards. */
export const completed = (transaction) => new Promise((resolve, reject) => {
  transaction.oncomplete = () => resolve();
  transaction.onabort = () => reject(transaction.error ?? new Error("the browser gave up writing"));
});

/** The keys of all messages of a conversation. */
export const messagesOf = (id) => IDBKeyRange.bound([id], [id, []]);

export async function openDatabase() {
  const request = indexedDB.open(NAME, VERSION);
  request.onupgradeneeded = ({ oldVersion }) => upgrade(request.result, request.transaction, oldVersion);
  return resultOf(request);
}

function upgrade(database, transaction, oldVersion) {
  if (oldVersion < 1) database.createObjectStore(HEADS, { keyPath: "id" });
  if (oldVersion < 2) database.createObjectStore(FILES, { keyPath: "id" });
  if (oldVersion < 3) {
    database.createObjectStore(MESSAGES, { keyPath: ["conversation", "id"] });
    database.createObjectStore(DRAFTS, { keyPath: "id" });
    splitConversations(transaction);
  }
}

/** Give the messages of conversations, which were lists inside them, records of their own. */
function splitConversations(transaction) {
  transaction.objectStore(HEADS).openCursor().onsuccess = ({ target: { result: cursor } }) => {
    if (!cursor) return;
    const { messages, ...head } = fromList(cursor.value);
    for (const message of messages.values()) transaction.objectStore(MESSAGES).put({ conversation: head.id, ...message });
    cursor.update(head);
    cursor.continue();
  };
}
