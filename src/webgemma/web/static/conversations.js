// Conversations, stored in IndexedDB: it holds far more than localStorage's 5 MB, writes one conversation at a
// time, and does not block the page while a reply streams in. Files of attachments are stored beside the
// conversations, each written once. Names of the database, its stores and fields are in users' browsers: they stay.

const DATABASE = "webgemma";
const STORE = "conversations";
const FILES = "attachments"; // {id, blob}
const BOTH = [STORE, FILES];
const TITLE_LENGTH = 48;

const resultOf = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function openDatabase() {
  const request = indexedDB.open(DATABASE, 2);
  request.onupgradeneeded = ({ oldVersion }) => {
    for (const name of oldVersion < 1 ? BOTH : [FILES]) request.result.createObjectStore(name, { keyPath: "id" });
  };
  return resultOf(request);
}

/** Return all attachments of a conversation. */
export const attachmentsOf = ({ messages }) => messages.flatMap(({ attachments }) => attachments ?? []);

/** Return a conversation with `change` applied to each attachment. */
export const withAttachments = (conversation, change) => ({
  ...conversation,
  messages: conversation.messages.map((message) => (message.attachments
    ? { ...message, attachments: message.attachments.map(change) }
    : message)),
});

/** Return a title: the first words of a text. */
export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  if (line.length <= TITLE_LENGTH) return line || "New conversation";
  const cut = line.slice(0, TITLE_LENGTH);
  return `${cut.slice(0, Math.max(cut.lastIndexOf(" "), TITLE_LENGTH / 2)).trimEnd()} …`;
}

/** All conversations; without a database they last until the page is closed. */
export class Conversations {
  constructor() {
    this.byId = new Map();
    this.savedFiles = new Set(); // ids of the attachments that are in the database
    this.database = null;
  }

  /** Read the stored conversations; return null, or a message if the browser cannot store any. */
  async open() {
    try {
      this.database = await openDatabase();
      this.database.onversionchange = () => this.database.close();
      await this.read();
      return null;
    } catch (error) {
      this.database = null;
      return `This browser does not store conversations (${error.message}): export those you need before you close the page.`;
    }
  }

  /** Read everything; delete files that no message has any more. */
  async read() {
    const transaction = this.database.transaction(BOTH, "readwrite");
    const stored = resultOf(transaction.objectStore(STORE).getAll());
    const files = await resultOf(transaction.objectStore(FILES).getAll());
    const blobs = new Map(files.map(({ id, blob }) => [id, blob]));
    for (const entry of await stored) {
      const conversation = withAttachments(entry, (each) => ({ ...each, blob: blobs.get(each.id) ?? null }));
      this.byId.set(conversation.id, conversation);
      this.noteFiles(conversation);
    }
    for (const id of blobs.keys()) if (!this.savedFiles.has(id)) transaction.objectStore(FILES).delete(id);
  }

  /** Write a conversation and those of its files that are not in the database. */
  put(transaction, conversation) {
    for (const { id, blob } of attachmentsOf(conversation)) {
      if (blob && !this.savedFiles.has(id)) transaction.objectStore(FILES).put({ id, blob });
    }
    return transaction.objectStore(STORE).put(withAttachments(conversation, ({ blob, ...facts }) => facts));
  }

  noteFiles(conversation) {
    for (const { id } of attachmentsOf(conversation)) this.savedFiles.add(id);
  }

  /** Return all conversations, the latest first. */
  list() {
    return [...this.byId.values()].sort((a, b) => b.updated - a.updated);
  }

  get(id) {
    return this.byId.get(id);
  }

  /** Return an empty conversation; it is not stored before `save`. */
  create() {
    const now = Date.now();
    return { id: crypto.randomUUID(), title: "New conversation", created: now, updated: now, messages: [] };
  }

  /** Store a conversation as it is. */
  async save(conversation) {
    this.byId.set(conversation.id, conversation);
    if (!this.database) return;
    const transaction = this.database.transaction(BOTH, "readwrite");
    const written = resultOf(this.put(transaction, conversation));
    transaction.commit(); // at once: the page may be closing
    await written;
    this.noteFiles(conversation);
  }

  /** Store all of the conversations, or none if one cannot be stored. */
  async saveAll(conversations) {
    if (this.database) {
      const transaction = this.database.transaction(BOTH, "readwrite");
      const completed = new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = () => reject(transaction.error);
      });
      for (const conversation of conversations) this.put(transaction, conversation);
      await completed;
      conversations.forEach((conversation) => this.noteFiles(conversation));
    }
    for (const conversation of conversations) this.byId.set(conversation.id, conversation);
  }

  async remove(id) {
    const files = attachmentsOf(this.byId.get(id) ?? { messages: [] });
    this.byId.delete(id);
    if (!this.database) return;
    const transaction = this.database.transaction(BOTH, "readwrite");
    for (const file of files) transaction.objectStore(FILES).delete(file.id);
    await resultOf(transaction.objectStore(STORE).delete(id));
  }
}
