// The page's database, in IndexedDB: it holds far more than localStorage's 5 MB and does not block the page while a
// reply streams in. Every message is a record of its own, so that tabs do not overwrite each other's. Names of the
// database, its stores and fields are in users' browsers: they stay.

import { scoped } from "./scope.js";
import { fromList } from "./tree.js";

const NAME = scoped("webgemma");
const VERSION = 4; // pages of version 3 would write conversations without their pins, and so must not
export const HEADS = "conversations"; // all of a conversation but its messages: see tree.js
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

/** Read the messages of a conversation with their files: {messages, fileIds}, the latter of the files that there are. */
export async function readMessages(database, id) {
  const transaction = database.transaction([MESSAGES, FILES]);
  const records = await resultOf(transaction.objectStore(MESSAGES).getAll(messagesOf(id)));
  const attachments = records.flatMap((record) => record.attachments ?? []);
  const ids = [...new Set(attachments.map((each) => each.id))];
  const files = await Promise.all(ids.map((each) => resultOf(transaction.objectStore(FILES).get(each))));
  const blobs = new Map(files.filter(Boolean).map((file) => [file.id, file.blob]));
  for (const each of attachments) each.blob = blobs.get(each.id) ?? null;
  return { messages: records.map(({ conversation, ...message }) => message), fileIds: blobs.keys() };
}

/** Return the ids of all conversations that messages name, also of those that do not exist. */
async function namedConversations(database) {
  const ids = [];
  const request = database.transaction(MESSAGES).objectStore(MESSAGES).openKeyCursor();
  await new Promise((resolve, reject) => {
    request.onerror = () => reject(request.error);
    request.onsuccess = ({ target: { result: cursor } }) => {
      if (!cursor) {
        resolve();
        return;
      }
      ids.push(cursor.key[0]);
      cursor.continue([cursor.key[0], []]); // past its messages
    };
  });
  return ids;
}

export const fileIds = (database) => resultOf(database.transaction(FILES).objectStore(FILES).getAllKeys());

/** Delete messages without a conversation, and those of these files that are not needed; `neededIds()` says which are. */
export async function deleteUnreachable(database, files, neededIds) {
  const named = await namedConversations(database);
  const transaction = database.transaction(ALL, "readwrite");
  const exists = new Set(await resultOf(transaction.objectStore(HEADS).getAllKeys()));
  for (const id of named) if (!exists.has(id)) transaction.objectStore(MESSAGES).delete(messagesOf(id));
  const needed = neededIds();
  for (const id of files) if (!needed.has(id)) transaction.objectStore(FILES).delete(id);
  await completed(transaction);
}
