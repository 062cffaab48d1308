// Drafts: what is in the message box belongs to its conversation, and outlives the page. And what this tab shows,
// which a reload keeps and other tabs do not share.

import { DRAFTS, resultOf } from "./database.js";
import { randomId } from "./dom.js";

const SAVE_MILLISECONDS = 300; // between two writes while the user types
const MAX_AGE_MILLISECONDS = 30 * 24 * 60 * 60 * 1000; // of the draft of a conversation that was never begun

/** The drafts by the id of their conversation: {id, text, attachments, updated}. */
export class Drafts {
  constructor() {
    this.byId = new Map();
    this.changed = new Set(); // those that are not written
    this.timer = null;
  }

  /** Read the drafts from the database of the conversations; delete old ones whose conversation does not exist. */
  async open(conversations) {
    this.conversations = conversations;
    if (!conversations.database) return;
    const store = conversations.database.transaction(DRAFTS, "readwrite").objectStore(DRAFTS);
    for (const draft of await resultOf(store.getAll())) {
      const isOld = Date.now() - draft.updated > MAX_AGE_MILLISECONDS;
      if (isOld && !conversations.get(draft.id)) store.delete(draft.id);
      else this.byId.set(draft.id, draft);
    }
  }

  /** Return the draft of a conversation, always the same object. */
  of(id) {
    if (!this.byId.has(id)) this.byId.set(id, { id, text: "", attachments: [] });
    return this.byId.get(id);
  }

  /** Whether a conversation has something in its draft. */
  has(id) {
    const draft = this.byId.get(id);
    return Boolean(draft && (draft.text || draft.attachments.length));
  }

  /** Note that a draft has changed; it is written soon. */
  save(draft) {
    this.changed.add(draft);
    this.timer ??= setTimeout(() => this.write(), SAVE_MILLISECONDS);
  }

  remove(id) {
    this.changed.delete(this.byId.get(id));
    this.byId.delete(id);
  }

  /** Write at once: the page may be closing. */
  write() {
    clearTimeout(this.timer);
    this.timer = null;
    const { database } = this.conversations;
    if (!database || !this.changed.size) return;
    try {
      const transaction = database.transaction(DRAFTS, "readwrite");
      const drafts = [...this.changed];
      this.changed.clear();
      transaction.onabort = () => drafts.forEach((draft) => this.changed.add(draft)); // written with the next change
      const store = transaction.objectStore(DRAFTS);
      for (const draft of drafts) {
        if (this.has(draft.id)) store.put({ ...draft, updated: Date.now() });
        else store.delete(draft.id);
      }
      transaction.commit();
    } catch { /* the database is closed: the draft is in the box, and Conversations says so */ }
  }
}

const SHOWN = "webgemma.conversation";
const NEW = "webgemma.new-conversation";

function session(key, value) {
  try {
    if (value !== undefined) sessionStorage.setItem(key, value);
    return sessionStorage.getItem(key);
  } catch {
    return value ?? null; // storage is forbidden: a reload shows the latest conversation
  }
}

/** Return the id of the conversation that this tab has shown before a reload, or null. */
export const shownId = () => session(SHOWN);

export const rememberShown = (id) => session(SHOWN, id);

/** Return the id of this tab's next conversation, which may have a draft; `isTaken(id)`: it has been begun. */
export function newId(isTaken) {
  const id = session(NEW);
  return id && !isTaken(id) ? id : session(NEW, randomId());
}
