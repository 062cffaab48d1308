// The conversations, kept in IndexedDB: it holds far more than localStorage's 5 MB, writes one
// conversation at a time, and does not stop the page while a reply streams in.

const DATABASE = "webgemma";
const STORE = "conversations";
const TITLE_LENGTH = 48;

const settled = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function openDatabase() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
  return settled(request);
}

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
    this.database = null;
  }

  /** Read what is kept; a sentence if nothing can be. */
  async open() {
    try {
      this.database = await openDatabase();
      this.database.onversionchange = () => this.database.close();
      const kept = await settled(this.objects("readonly").getAll());
      for (const conversation of kept) this.byId.set(conversation.id, conversation);
      return null;
    } catch (error) {
      this.database = null;
      return `This browser keeps no conversations (${error.message}): export what you want to keep before you close the page.`;
    }
  }

  objects(mode) {
    return this.database.transaction(STORE, mode).objectStore(STORE);
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
    const objects = this.objects("readwrite");
    const put = settled(objects.put(conversation));
    objects.transaction.commit(); // at once: the page may be closing
    await put;
  }

  /** Keep all of them or, if one cannot be, none. */
  async keepAll(conversations) {
    if (this.database) {
      const transaction = this.database.transaction(STORE, "readwrite");
      const whole = new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = () => reject(transaction.error);
      });
      for (const conversation of conversations) transaction.objectStore(STORE).put(conversation);
      await whole;
    }
    for (const conversation of conversations) this.byId.set(conversation.id, conversation);
  }

  async remove(id) {
    this.byId.delete(id);
    if (this.database) await settled(this.objects("readwrite").delete(id));
  }
}
