// One conversation with the model: what is said, and the reply that is on its way.

import { asParts } from "./attachments.js";
import { titleOf } from "./conversations.js";
import { chatSettings } from "./settings.js";

const KEEP_MILLISECONDS = 500; // between two writes of a conversation while its reply grows

/** A conversation is called what its first message says, or shows. */
const titleBy = ({ content, attachments = [] }) => titleOf(content || attachments[0]?.name || "");

/**
 * Holds the conversation that is shown and the one reply that may be in progress, which may belong
 * to another. `view` has changed(), grown(message), finished(message), notKept(error) and notSent(error).
 */
export class Chat {
  constructor(engine, conversations, view) {
    this.engine = engine;
    this.conversations = conversations;
    this.view = view;
    this.conversation = conversations.list()[0] ?? conversations.create();
    this.reply = null; // {id, conversation, message, isAsked, sensing, canvas}; the last two as the engine tells them
    this.keepTimer = null;
    for (const what of ["sensing", "canvas"]) engine.addEventListener(what, ({ detail }) => this.hearState(what, detail));
    engine.addEventListener("piece", ({ detail }) => this.hearPiece(detail));
    engine.addEventListener("done", ({ detail }) => this.hearDone(detail));
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

  /** Say and show something; the reply begins at once. */
  send(text, attachments, settings) {
    const { conversation } = this;
    const message = { role: "user", content: text };
    if (attachments.length) message.attachments = attachments;
    if (!conversation.messages.length && conversation.title === titleOf("")) conversation.title = titleBy(message);
    conversation.messages.push(message);
    this.answer(settings);
  }

  /** Say something else in place of a message; all that followed it is cut. */
  edit(message, text, attachments, settings) {
    const { conversation } = this;
    const at = conversation.messages.indexOf(message);
    if (at < 0 || this.reply) return;
    if (at === 0 && conversation.title === titleBy(message)) conversation.title = titleOf("");
    conversation.messages.length = at;
    this.send(text, attachments, settings);
  }

  /** Another reply in place of the last. */
  regenerate(settings) {
    const { messages } = this.conversation;
    if (this.reply || !messages.length) return;
    if (messages.at(-1).role === "assistant") messages.pop();
    this.answer(settings);
  }

  answer(settings) {
    const { conversation } = this;
    const said = conversation.messages.filter(({ role, content }) => role === "user" || content);
    const message = { role: "assistant", content: "" };
    conversation.messages.push(message);
    conversation.updated = Date.now();
    this.reply = { id: crypto.randomUUID(), conversation, message, isAsked: false, sensing: null, canvas: null };
    this.ask(this.reply, said, settings);
    this.keep(conversation);
    this.view.changed();
  }

  /** Hand the conversation to the engine, once its sounds are decoded. */
  async ask(reply, said, settings) {
    try {
      const messages = await Promise.all(said.map(async (each) => ({ role: each.role, content: await asParts(each) })));
      if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
      if (this.reply !== reply) return; // stopped meanwhile
      reply.isAsked = true;
      this.engine.chat(reply.id, messages, chatSettings(settings));
    } catch (error) {
      if (this.reply !== reply) return;
      this.finish({ finish: "error" });
      this.view.notSent(error);
    }
  }

  stop() {
    if (this.reply?.isAsked) this.engine.stop(this.reply.id);
    else this.finish({ finish: "stopped" });
  }

  /** What the engine does while there is no text yet. */
  hearState(what, told) {
    if (told.id !== this.reply?.id) return;
    this.reply[what] = told;
    this.view.grown(this.reply.message);
  }

  hearPiece({ id, text, thinking }) {
    if (id !== this.reply?.id) return;
    const { message, conversation } = this.reply;
    this.reply.canvas = null; // it has become text
    if (thinking) message.thinking = (message.thinking ?? "") + text;
    else message.content += text;
    this.view.grown(message);
    this.keepTimer ??= setTimeout(() => this.keep(conversation), KEEP_MILLISECONDS);
  }

  hearDone({ id, finish, tokens, tokens_per_second }) {
    if (id === this.reply?.id) this.finish({ finish, tokens, tokens_per_second });
  }

  /** The reply ends as it is, also when the worker is no more there to say so. */
  finish(facts) {
    if (!this.reply) return;
    const { message, conversation } = this.reply;
    Object.assign(message, facts);
    this.reply = null;
    this.keep(conversation);
    this.view.finished(message);
  }

  keep(conversation) {
    clearTimeout(this.keepTimer);
    this.keepTimer = null;
    this.conversations.keep(conversation).catch((error) => this.view.notKept(error));
  }

  /** Write what is not written yet: the page may be closing. */
  keepNow() {
    if (this.keepTimer !== null) this.keep(this.reply.conversation);
  }

  rename(id, title) {
    const conversation = this.conversations.get(id);
    conversation.title = title;
    this.keep(conversation);
    this.view.changed();
  }

  async remove(id) {
    if (this.reply?.conversation.id === id) {
      this.stop();
      this.reply = null;
      clearTimeout(this.keepTimer);
      this.keepTimer = null;
    }
    const isShown = this.conversation.id === id;
    await this.conversations.remove(id);
    if (isShown) this.conversation = this.conversations.list()[0] ?? this.conversations.create();
    this.view.changed();
  }
}
