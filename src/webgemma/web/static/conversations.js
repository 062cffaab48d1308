// The conversations, kept in IndexedDB: it holds far more than localStorage's 5 MB, writes one
// conversation at a time, and does not stop the page while a reply streams in. The files that belong to
// messages are kept beside them, each written once.

const DATABASE = "webgemma";
const STORE = "conversations";
const FILES = "attachments"; // {id, blob}
const BOTH = [STORE, FILES];
const TITLE_LENGTH = 48;

const settled = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function openDatabase() {
  const request = indexedDB.open(DATABASE, 2);
  request.onupgradeneeded = ({ oldVersion }) => {
    for (const name of oldVersion < 1 ? BOTH : [FILES]) request.result.createObjectStore(name, { keyPath: "id" });
  };
  return settled(request);
}

/** All attachments of a conversation. */
export const attachmentsOf = ({ messages }) => messages.flatMap(({ attachments }) => attachments ?? []);

/** A conversation whose attachments are what `change` makes of them. */
export const withAttachments = (conversation, change) => ({
  ...conversation,
  messages: conversation.messages.map((message) => (message.attachments
    ? { ...message, attachments: message.attachments.map(change) }
    : message)),
});

/** A title of the first words. */
export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  if (line.length <= TITLE_LENGTH) return line || "New conversation";
  const cut = line.slice(0, TITLE_LENGTH);
  return `${cut.slice(0, Math.max(cut.lastIndexOf(" "), TITLE_LENGTH / 2)).trimEnd()} …`;
}

/** All conversations, the newest first; where the browser keeps nothing, they last as long as the page. */
export class Conversations {
  constructor() {
    this.byId = new Map();
    this.keptFiles = new Set(); // the ids of attachments that are written
    this.database = null;
  }

  /** Read what is kept; a sentence if nothing can be. */
  async open() {
    try {
      this.database = await openDatabase();
      this.database.onversionchange = () => this.database.close();
      await this.read();
      return null;
    } catch (error) {
      this.database = null;
      return `This browser keeps no conversations (${error.message}): export what you want to keep before you close the page.`;
    }
  }

  /** Read everything; files that no message has any more are deleted. */
  async read() {
    const transaction = this.database.transaction(BOTH, "readwrite");
    const kept = settled(transaction.objectStore(STORE).getAll());
    const files = await settled(transaction.objectStore(FILES).getAll());
    const blobs = new Map(files.map(({ id, blob }) => [id, blob]));
    for (const conversation of await kept) {
      const whole = withAttachments(conversation, (each) => ({ ...each, blob: blobs.get(each.id) ?? null }));
      this.byId.set(whole.id, whole);
      for (const { id } of attachmentsOf(whole)) this.keptFiles.add(id);
    }
    for (const id of blobs.keys()) if (!this.keptFiles.has(id)) transaction.objectStore(FILES).delete(id);
  }

  /** Write a conversation, and those of its files that are not written yet. */
  put(transaction, conversation) {
    for (const { id, blob } of attachmentsOf(conversation)) {
      if (blob && !this.keptFiles.has(id)) transaction.objectStore(FILES).put({ id, blob });
    }
    return transaction.objectStore(STORE).put(withAttachments(conversation, ({ blob, ...facts }) => facts));
  }

  noteFiles(conversation) {
    for (const { id } of attachmentsOf(conversation)) this.keptFiles.add(id);
  }

  list() {
    return [...this.byId.values()].sort((a, b) => b.updated - a.updated);
  }

  get(id) {
    return this.byId.get(id);
  }

  /** A new one; it is kept once something is said in it. */
  create() {
    const now = Date.now();
    return { id: crypto.randomUUID(), title: "New conversation", created: now, updated: now, messages: [] };
  }

  /** Keep a conversation as it is now. */
  async keep(conversation) {
    this.byId.set(conversation.id, conversation);
    if (!this.database) return;
    const transaction = this.database.transaction(BOTH, "readwrite");
    const put = settled(this.put(transaction, conversation));
    transaction.commit(); // at once: the page may be closing
    await put;
    this.noteFiles(conversation);
  }

  /** Keep all of them or, if one cannot be, none. */
  async keepAll(conversations) {
    if (this.database) {
      const transaction = this.database.transaction(BOTH, "readwrite");
      const whole = new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = () => reject(transaction.error);
      });
      for (const conversation of conversations) this.put(transaction, conversation);
      await whole;
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
    await settled(transaction.objectStore(STORE).delete(id));
  }
}
