// The conversations, in the database and in step with other tabs: what a tab has written it tells the others.

import {
  ALL, DRAFTS, FILES, HEADS, MESSAGES, completed, deleteUnreachable, fileIds, messagesOf, openDatabase, readMessages, resultOf,
} from "./database.js";
import { randomId } from "./dom.js";
import { t } from "./language.js";
import { scoped } from "./scope.js";
import { NEVER, attachmentsOf, emptyConversation, isDeleted, mark } from "./tree.js";

const CHANNEL = scoped("webgemma.conversations");
const TEXTS = [HEADS, MESSAGES];
const RETRY_MILLISECONDS = 3000; // between two attempts to write what could not be written
const PURGE_RETRY_MILLISECONDS = 60_000; // between two attempts to delete for good what could not be
export const KEEP_MILLISECONDS = 15_000; // how long a deleted conversation can be restored, also after a reload

const headOf = ({ messages, ...facts }) => facts;

/** Return a message without the blobs of its attachments. */
const withoutBlobs = (message) => (message.attachments
  ? { ...message, attachments: message.attachments.map(({ blob, ...facts }) => facts) }
  : { ...message });

/** Return a stored message with the files of the same one in memory: they may not be in the database yet. */
function withKnownBlobs(message, { attachments = [] }) {
  const blobs = new Map(attachments.map(({ id, blob }) => [id, blob]));
  const complete = ({ blob, ...facts }) => ({ ...facts, blob: blob ?? blobs.get(facts.id) ?? null });
  return message.attachments ? { ...message, attachments: message.attachments.map(complete) } : message;
}

/**
 * All conversations; without a database they last until the page is closed. Those that were deleted are in the trash
 * for a while. Opening reads what they are called; their messages are read when they are needed (`complete`), and in
 * the background. Events: "changed" (another tab has changed some), "removed" (detail: a conversation that another tab
 * has deleted), "purged" (detail: one that is deleted for good), "unsaved" (detail: the error; it will be tried again)
 * and "saved" (everything is written again).
 */
export class Conversations extends EventTarget {
  constructor() {
    super();
    this.byId = new Map();
    this.trash = new Map(); // those that were deleted and can be restored, by id
    this.unread = new Set(); // conversations whose messages are not read
    this.reading = new Map(); // by conversation, the promise of its messages
    this.heard = new WeakMap(); // by message, when another tab has reported it: reading may have begun before
    this.heardCount = 0;
    this.shown = null; // the conversation that this tab shows: other tabs do not change its leaf
    this.held = new Set(); // messages that this tab is writing: other tabs do not change them
    this.elsewhere = new WeakSet(); // messages that another tab is writing
    this.stored = new WeakSet(); // conversations that are in the database
    this.deleted = new Set(); // ids of conversations that were deleted, here or in another tab
    this.storedFiles = new Set(); // ids of the attachments that are in the database
    this.unsaved = new Map(); // by conversation, the messages that are not written
    this.unsavedFiles = new Map(); // by id, the files that are not written: {id, blob}
    this.inFlight = null; // those that are being written
    this.isWriting = false;
    this.transaction = null; // the latest
    this.error = null; // of the last attempt
    this.tab = randomId();
    this.writes = 0;
    this.database = null;
    this.channel = null; // to the other tabs
  }

  /** Read the stored conversations; return null, or a message if the browser cannot store any. */
  async open() {
    try {
      await this.connect();
      this.channel = new BroadcastChannel(CHANNEL);
      const early = []; // what other tabs say before everything is read
      this.channel.onmessage = ({ data }) => early.push(data);
      await this.read();
      this.channel.onmessage = ({ data }) => this.receive(data);
      early.forEach((data) => this.receive(data));
      return null;
    } catch (error) {
      this.database = null;
      this.channel?.close();
      this.channel = null;
      return t("This browser does not store conversations ({reason}): export those you need before you close the page.", { reason: error.message });
    }
  }

  async connect() {
    this.database = await openDatabase();
    this.database.onversionchange = () => this.database.close(); // a newer page needs it
    this.database.onclose = () => this.connect().catch(() => {}); // the browser has closed it: `write` says so
  }

  /** Read which conversations there are; the messages of each remain to be read. */
  async read() {
    const heads = await resultOf(this.database.transaction(HEADS).objectStore(HEADS).getAll());
    const ids = new Set(heads.map(({ id }) => id));
    for (const head of heads) this.unread.add(this.merge(head, []));
    for (const conversation of [...this.byId.values(), ...this.trash.values()]) {
      if (this.stored.has(conversation) && !ids.has(conversation.id)) this.drop(conversation);
    }
    this.schedulePurge();
  }

  /** Read the messages of a conversation, unless they are in memory; throws if they cannot be read. */
  async complete(conversation) {
    if (!this.unread.has(conversation)) return;
    if (!this.reading.has(conversation)) {
      const reading = this.readMessages(conversation).finally(() => this.reading.delete(conversation));
      this.reading.set(conversation, reading);
    }
    await this.reading.get(conversation);
  }

  async readMessages(conversation) {
    const start = this.heardCount;
    const { messages, fileIds: found } = await readMessages(this.database, conversation.id);
    for (const { id } of messages.flatMap(({ attachments = [] }) => attachments)) this.storedFiles.delete(id);
    for (const id of found) this.storedFiles.add(id);
    this.mergeMessages(conversation, messages.filter(({ id }) => !(this.heard.get(conversation.messages.get(id)) > start)));
    this.unread.delete(conversation);
  }

  /** Read the messages of all conversations; throws if they cannot be read. */
  async completeAll() {
    for (const conversation of [...this.list(), ...this.trash.values()]) await this.complete(conversation);
  }

  /** Read all messages while the page is in use; then delete what nothing leads to. */
  async readInBackground() {
    if (!this.database) return;
    try {
      const files = await fileIds(this.database); // those that are stored from now on are needed
      await this.completeAll();
      await deleteUnreachable(this.database, files, () => {
        const all = [...this.byId.values(), ...this.trash.values()];
        return new Set(all.flatMap((conversation) => attachmentsOf(conversation).map(({ id }) => id)));
      });
    } catch { /* the database is closed: `write` says so when there is something to write */ }
  }

  /** Read again what other tabs have written while this one was suspended. */
  async catchUp() {
    if (!this.database) return;
    try {
      await this.read();
      if (this.shown) await this.complete(this.shown);
      this.dispatchEvent(new Event("changed"));
      await this.completeAll();
    } catch { /* the database is closed: `write` says so when there is something to write */ }
  }

  /** Return all conversations, the latest first. */
  list() {
    return [...this.byId.values()].sort((a, b) => b.updated - a.updated);
  }

  get(id) {
    return this.byId.get(id);
  }

  /** Put a conversation into the trash, or where the others are; return whether it was in the other place. */
  place(conversation) {
    const { id } = conversation;
    const [from, to] = isDeleted(conversation) ? [this.byId, this.trash] : [this.trash, this.byId];
    to.set(id, conversation);
    return from.delete(id);
  }

  /** Whether something waits to be written, which a closing page would lose. */
  get isUnsaved() {
    return this.error !== null && this.unsaved.size + this.unsavedFiles.size > 0;
  }

  // Writing

  /** Store a conversation's facts and these of its messages, unless it is deleted for good. */
  save(conversation, ...messages) {
    if (this.deleted.has(conversation.id)) return;
    this.place(conversation);
    for (const message of messages) conversation.messages.set(message.id, message);
    if (!this.database) return;
    this.addUnsaved(conversation, messages);
    for (const file of messages.flatMap((message) => this.newFiles(message))) this.unsavedFiles.set(file.id, file);
    this.write();
  }

  addUnsaved(conversation, messages) {
    this.unsaved.set(conversation, new Set([...(this.unsaved.get(conversation) ?? []), ...messages]));
  }

  /** Write all that is not written; what cannot be written is tried again. */
  async write() {
    if (this.isWriting) return; // and then writes what has been added meanwhile
    this.isWriting = true;
    clearTimeout(this.retryTimer);
    let error = await this.writeTexts();
    for (const file of this.unsavedFiles.values()) { // the loop also visits those that are added meanwhile
      error = await this.writeFile(file) ?? error; // a full disk may have room for the next one
      error = await this.writeTexts() ?? error; // which were added meanwhile
    }
    if (error) this.retryTimer = setTimeout(() => this.write(), RETRY_MILLISECONDS);
    const before = this.error;
    this.error = error;
    this.isWriting = false;
    if (error && error.name !== before?.name) this.dispatchEvent(new CustomEvent("unsaved", { detail: error }));
    if (!error && before) this.dispatchEvent(new Event("saved"));
  }

  /** Do something in a transaction, and wait until it is on disk. */
  async transact(stores, act) {
    const transaction = this.database.transaction(stores, "readwrite");
    this.transaction = transaction;
    const [result] = await Promise.all([act(transaction), completed(transaction)]);
    return result;
  }

  /** Write messages without their files; return null or the error. */
  async writeTexts() {
    let error = null;
    while (this.unsaved.size && !error) {
      this.inFlight = this.unsaved;
      this.unsaved = new Map();
      error = await this.writeJobs(this.inFlight);
    }
    this.inFlight = null;
    return error;
  }

  /** Write messages in one transaction, and tell the other tabs; return null or the error. */
  async writeJobs(jobs) {
    try {
      const revisions = await this.transact(TEXTS, (transaction) => Promise.all(
        [...jobs].map(([conversation, messages]) => this.put(transaction, conversation, messages)),
      ));
      [...jobs.keys()].forEach((conversation, i) => {
        if (!revisions[i]) {
          this.drop(conversation);
          return;
        }
        for (const [message, revision] of revisions[i]) message.revision = revision;
        this.stored.add(conversation);
        this.tellSaved(conversation, revisions[i].keys());
        this.placeMerged(conversation);
      });
      return null;
    } catch (error) {
      for (const [conversation, messages] of jobs) if (!this.deleted.has(conversation.id)) this.addUnsaved(conversation, messages);
      return error;
    }
  }

  /** Tell the other tabs what is written of a conversation. */
  tellSaved(conversation, messages) {
    this.channel?.postMessage({ type: "saved", head: headOf(conversation), messages: [...messages] });
  }

  /** Write a file; return null or the error. */
  async writeFile(file) {
    try {
      await this.transact(FILES, (transaction) => transaction.objectStore(FILES).put(file));
      this.storedFiles.add(file.id);
      this.unsavedFiles.delete(file.id);
      return null;
    } catch (error) {
      return error;
    }
  }

  /** Return the files of a message that are not in the database. */
  newFiles({ attachments = [] }) {
    return attachments.filter(({ id, blob }) => blob && !this.storedFiles.has(id)).map(({ id, blob }) => ({ id, blob }));
  }

  /**
   * Write a conversation and messages after looking what other tabs have written. Return the revisions of the
   * messages, which they have once the transaction is on disk, or null if the conversation was deleted for good.
   */
  async put(transaction, conversation, messages) {
    const heads = transaction.objectStore(HEADS);
    const existing = await resultOf(heads.get(conversation.id));
    if (!existing && this.stored.has(conversation)) return null;
    const revisions = new Map();
    for (const message of messages) {
      const other = await resultOf(transaction.objectStore(MESSAGES).get([conversation.id, message.id]));
      const isNewer = other && other.revision !== message.revision && !other.revision?.startsWith(this.tab);
      if (isNewer) this.fork(conversation, message, other);
      revisions.set(message, this.putMessage(transaction, conversation, message));
    }
    if (existing) this.mergeHead(conversation, existing);
    heads.put(headOf(conversation));
    return revisions;
  }

  /** Write a message, and return its new revision. */
  putMessage(transaction, conversation, message) {
    this.writes += 1;
    const revision = `${this.tab} ${this.writes}`;
    transaction.objectStore(MESSAGES).put({ conversation: conversation.id, ...withoutBlobs(message), revision });
    return revision;
  }

  /** Make a message another version, because another tab has continued the same one. */
  fork(conversation, message, { conversation: _, ...other }) {
    conversation.messages.set(message.id, other);
    const id = randomId();
    if (conversation.leaf === message.id) conversation.leaf = id;
    Object.assign(message, { id, created: Date.now() });
    conversation.messages.set(id, message);
    this.dispatchEvent(new Event("changed"));
  }

  /** Write what is not written without looking first, as the page is closing: the texts, then the files. */
  writeNow() {
    const jobs = [...(this.inFlight ?? []), ...this.unsaved];
    if (!this.database || !(jobs.length || this.unsavedFiles.size)) return;
    try {
      this.transaction?.abort(); // it would have to read first, and others wait for it
    } catch { /* it is complete */ }
    try {
      const texts = this.database.transaction(TEXTS, "readwrite");
      for (const [conversation, messages] of jobs) {
        if (!this.stored.has(conversation) || isDeleted(conversation)) texts.objectStore(HEADS).put(headOf(conversation));
        for (const message of messages) message.revision = this.putMessage(texts, conversation, message);
        this.tellSaved(conversation, messages);
      }
      texts.commit();
      const files = this.database.transaction(FILES, "readwrite");
      for (const file of this.unsavedFiles.values()) files.objectStore(FILES).put(file);
      files.commit();
    } catch { /* the database is closed: `write` has said so */ }
  }

  /** Store new conversations, all or none; throws if they cannot be stored. */
  async add(conversations) {
    if (this.database) {
      const transaction = this.database.transaction(ALL, "readwrite");
      const done = completed(transaction);
      for (const conversation of conversations) {
        transaction.objectStore(HEADS).put(headOf(conversation));
        for (const message of conversation.messages.values()) {
          message.revision = this.putMessage(transaction, conversation, message);
          for (const file of this.newFiles(message)) transaction.objectStore(FILES).put(file);
        }
      }
      await done;
    }
    for (const conversation of conversations) {
      this.byId.set(conversation.id, conversation);
      this.deleted.delete(conversation.id);
      this.stored.add(conversation);
      for (const { id } of attachmentsOf(conversation)) this.storedFiles.add(id);
      this.tellSaved(conversation, conversation.messages.values());
    }
  }

  // Deleting

  /** Delete a conversation: it is in the trash for a while, in all tabs, and then deleted for good. */
  remove(conversation) {
    mark(conversation, "deleted", "restored");
    this.save(conversation);
    this.schedulePurge();
  }

  /** Restore a conversation that was deleted here or in another tab, also if it is not stored any more. */
  restore(conversation) {
    mark(conversation, "restored", "deleted");
    if (this.trash.has(conversation.id)) {
      this.save(conversation);
      return;
    }
    this.deleted.delete(conversation.id);
    this.stored.delete(conversation);
    for (const { id } of attachmentsOf(conversation)) this.storedFiles.delete(id);
    this.save(conversation, ...conversation.messages.values());
  }

  /** Delete for good, when it is time, what is in the trash. */
  schedulePurge(least = 0) {
    clearTimeout(this.purgeTimer);
    if (!this.trash.size) return;
    const due = Math.min(...[...this.trash.values()].map(({ deleted }) => deleted)) + KEEP_MILLISECONDS;
    this.purgeTimer = setTimeout(() => this.purgeDue(), Math.max(least, due - Date.now()));
  }

  async purgeDue() {
    const due = [...this.trash.values()].filter(({ deleted }) => deleted + KEEP_MILLISECONDS <= Date.now());
    let hasFailed = false;
    for (const conversation of due) {
      try {
        await this.purge(conversation);
      } catch {
        hasFailed = true; // it stays in the trash
      }
    }
    this.schedulePurge(hasFailed ? PURGE_RETRY_MILLISECONDS : 0);
  }

  /** Delete a conversation for good, unless another tab has restored it; throws, and keeps it, if that cannot be stored. */
  async purge(conversation) {
    const { id } = conversation;
    if (this.database) {
      await this.complete(conversation); // its files
      const transaction = this.database.transaction(ALL, "readwrite");
      const done = completed(transaction);
      const existing = await resultOf(transaction.objectStore(HEADS).get(id));
      if (existing) this.mergeHead(conversation, existing);
      if (isDeleted(conversation)) {
        for (const store of [HEADS, DRAFTS]) transaction.objectStore(store).delete(id);
        transaction.objectStore(MESSAGES).delete(messagesOf(id));
        for (const file of attachmentsOf(conversation)) transaction.objectStore(FILES).delete(file.id);
      }
      await done;
    }
    if (!isDeleted(conversation)) { // restored meanwhile, perhaps by another tab
      if (this.place(conversation)) this.dispatchEvent(new Event("changed"));
      return;
    }
    this.drop(conversation);
    this.channel?.postMessage({ type: "removed", id });
  }

  // Other tabs

  async receive({ type, id, tab, head, messages }) {
    if (type === "removed") {
      const removed = this.byId.get(id) ?? this.trash.get(id);
      if (removed) this.drop(removed);
      return;
    }
    if (type === "closed") {
      this.release(tab);
      return;
    }
    if (this.deleted.has(head.id) && !await this.isStored(head.id)) return; // it was written before it was deleted
    const conversation = this.merge(head, messages);
    this.heardCount += 1;
    for (const { id: each, finish } of messages) {
      const message = conversation.messages.get(each);
      this.heard.set(message, this.heardCount);
      if (this.held.has(message)) continue;
      if (finish === "unfinished") this.elsewhere.add(message);
      else this.elsewhere.delete(message);
    }
    this.schedulePurge();
    this.dispatchEvent(new Event("changed"));
  }

  /** Whether a conversation is in the database. */
  async isStored(id) {
    try {
      return Boolean(await resultOf(this.database.transaction(HEADS).objectStore(HEADS).get(id)));
    } catch {
      return false; // the database is closed
    }
  }

  /** Tell the other tabs that this one, which is closing, writes nothing any more. */
  leave() {
    this.channel?.postMessage({ type: "closed", tab: this.tab });
  }

  /** Note that a tab is closed: what it was writing can be continued. */
  release(tab) {
    for (const { messages } of this.byId.values()) {
      for (const message of messages.values()) if (message.revision?.startsWith(tab)) this.elsewhere.delete(message);
    }
    this.dispatchEvent(new Event("changed"));
  }

  /** Take over what is stored of a conversation; return it. */
  merge(head, messages) {
    const isShownNew = this.shown?.id === head.id;
    const conversation = this.byId.get(head.id) ?? this.trash.get(head.id)
      ?? (isShownNew ? this.shown : { ...emptyConversation(head.id), ...head });
    this.deleted.delete(head.id);
    this.stored.add(conversation);
    this.mergeHead(conversation, head);
    if (conversation !== this.shown) conversation.leaf = head.leaf;
    this.mergeMessages(conversation, messages);
    this.placeMerged(conversation);
    return conversation;
  }

  mergeMessages(conversation, messages) {
    for (const message of messages) {
      const mine = conversation.messages.get(message.id);
      if (!mine) conversation.messages.set(message.id, message);
      else if (!this.isMine(conversation, mine)) Object.assign(mine, withKnownBlobs(message, mine));
    }
  }

  /** Put a conversation where it belongs by what another tab has stored of it. */
  placeMerged(conversation) {
    const wasMoved = this.place(conversation);
    if (wasMoved && isDeleted(conversation)) this.dispatchEvent(new CustomEvent("removed", { detail: conversation }));
  }

  /** Whether this tab is writing a message: what another has written of it is then noticed by `put`. */
  isMine(conversation, message) {
    return this.held.has(message) || [this.unsaved, this.inFlight].some((jobs) => jobs?.get(conversation)?.has(message));
  }

  mergeHead(conversation, { title, updated, titled = 0, settings, tools = [], tooled = 0, ...times }) {
    if (settings?.changed > (conversation.settings?.changed ?? 0)) conversation.settings = settings;
    conversation.updated = Math.max(conversation.updated, updated);
    if (tooled > (conversation.tooled ?? 0)) Object.assign(conversation, { tools, tooled });
    for (const name of Object.keys(NEVER)) conversation[name] = Math.max(conversation[name], times[name] ?? 0);
    if (titled > conversation.titled) Object.assign(conversation, { title, titled });
  }

  /** Do not write what waits to be written of a conversation. */
  forget(conversation) {
    this.unsaved.delete(conversation);
    for (const { id } of attachmentsOf(conversation)) this.unsavedFiles.delete(id);
  }

  /** Forget a conversation that is deleted for good. */
  drop(conversation) {
    const { id } = conversation;
    const wasInUse = this.byId.delete(id);
    this.trash.delete(id);
    this.unread.delete(conversation);
    this.deleted.add(id);
    this.forget(conversation);
    this.dispatchEvent(new CustomEvent("purged", { detail: conversation }));
    if (wasInUse) this.dispatchEvent(new CustomEvent("removed", { detail: conversation }));
  }
}
