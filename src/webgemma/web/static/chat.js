// The conversation that is shown, and the reply that is in progress.

import { contentOf } from "./attachments.js";
import { titleOf } from "./conversations.js";
import { chatSettings } from "./settings.js";

const SAVE_MILLISECONDS = 500; // between two writes of a conversation while its reply grows

/** Return the title of a conversation from its first message: the text, or the first attachment's name. */
const titleFrom = ({ content, attachments = [] }) => titleOf(content || attachments[0]?.name || "");

/**
 * Holds the conversation that is shown and at most one reply in progress, which may belong to another
 * conversation. `view` has changed(), grown(message), finished(message), notSaved(error) and notSent(error).
 */
export class Chat {
  constructor(engine, conversations, view) {
    this.engine = engine;
    this.conversations = conversations;
    this.view = view;
    this.conversation = conversations.list()[0] ?? conversations.create();
    this.reply = null; // {id, conversation, message, isSent, encoding, canvas}; the last two: messages of the engine
    this.saveTimer = null;
    for (const type of ["encoding", "canvas"]) engine.addEventListener(type, ({ detail }) => this.onState(type, detail));
    engine.addEventListener("piece", ({ detail }) => this.onPiece(detail));
    engine.addEventListener("done", ({ detail }) => this.onDone(detail));
  }

  /** The message in progress, if it belongs to the conversation that is shown. */
  get replying() {
    return this.reply?.conversation === this.conversation ? this.reply.message : null;
  }

  open(id) {
    this.conversation = this.conversations.get(id) ?? this.conversations.create();
    this.view.changed();
  }

  startNew() {
    if (this.conversation.messages.length) this.conversation = this.conversations.create();
    this.view.changed();
  }

  /** Add a message of the user, and request the reply. */
  send(text, attachments, settings) {
    const { conversation } = this;
    const message = { role: "user", content: text };
    if (attachments.length) message.attachments = attachments;
    if (!conversation.messages.length && conversation.title === titleOf("")) conversation.title = titleFrom(message);
    conversation.messages.push(message);
    this.startReply(settings);
  }

  /** Replace a message of the user and remove everything after it, then request the reply. */
  edit(message, text, attachments, settings) {
    const { conversation } = this;
    const at = conversation.messages.indexOf(message);
    if (at < 0 || this.reply) return;
    if (at === 0 && conversation.title === titleFrom(message)) conversation.title = titleOf("");
    conversation.messages.length = at;
    this.send(text, attachments, settings);
  }

  /** Replace the last reply by another one. */
  regenerate(settings) {
    const { messages } = this.conversation;
    if (this.reply || !messages.length) return;
    if (messages.at(-1).role === "assistant") messages.pop();
    this.startReply(settings);
  }

  startReply(settings) {
    const { conversation } = this;
    const history = conversation.messages.filter(({ role, content }) => role === "user" || content);
    const message = { role: "assistant", content: "" };
    conversation.messages.push(message);
    conversation.updated = Date.now();
    this.reply = { id: crypto.randomUUID(), conversation, message, isSent: false, encoding: null, canvas: null };
    this.request(this.reply, history, settings);
    this.save(conversation);
    this.view.changed();
  }

  /** Send the conversation to the engine, after its audio is decoded. */
  async request(reply, history, settings) {
    try {
      const messages = await Promise.all(history.map(async (each) => ({ role: each.role, content: await contentOf(each) })));
      if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
      if (this.reply !== reply) return; // stopped meanwhile
      reply.isSent = true;
      this.engine.chat(reply.id, messages, chatSettings(settings));
    } catch (error) {
      if (this.reply !== reply) return;
      this.finish({ finish: "error" });
      this.view.notSent(error);
    }
  }

  stop() {
    if (this.reply?.isSent) this.engine.stop(this.reply.id);
    else this.finish({ finish: "stopped" });
  }

  /** Note the engine's progress before there is text. */
  onState(type, detail) {
    if (detail.id !== this.reply?.id) return;
    this.reply[type] = detail;
    this.view.grown(this.reply.message);
  }

  onPiece({ id, text, thinking }) {
    if (id !== this.reply?.id) return;
    const { message, conversation } = this.reply;
    this.reply.canvas = null; // its text follows as pieces
    if (thinking) message.thinking = (message.thinking ?? "") + text;
    else message.content += text;
    this.view.grown(message);
    this.saveTimer ??= setTimeout(() => this.save(conversation), SAVE_MILLISECONDS);
  }

  onDone({ id, finish, tokens, tokens_per_second }) {
    if (id === this.reply?.id) this.finish({ finish, tokens, tokens_per_second });
  }

  /** End the reply as it is, also when the worker cannot report its end any more. */
  finish(facts) {
    if (!this.reply) return;
    const { message, conversation } = this.reply;
    Object.assign(message, facts);
    this.reply = null;
    this.save(conversation);
    this.view.finished(message);
  }

  save(conversation) {
    clearTimeout(this.saveTimer);
    this.saveTimer = null;
    this.conversations.save(conversation).catch((error) => this.view.notSaved(error));
  }

  /** Save at once what waits to be saved: the page may be closing. */
  saveNow() {
    if (this.saveTimer !== null) this.save(this.reply.conversation);
  }

  rename(id, title) {
    const conversation = this.conversations.get(id);
    conversation.title = title;
    this.save(conversation);
    this.view.changed();
  }

  async remove(id) {
    if (this.reply?.conversation.id === id) {
      this.stop();
      this.reply = null;
      clearTimeout(this.saveTimer);
      this.saveTimer = null;
    }
    const isShown = this.conversation.id === id;
    await this.conversations.remove(id);
    if (isShown) this.conversation = this.conversations.list()[0] ?? this.conversations.create();
    this.view.changed();
  }
}
