// The conversation that is shown, and the reply that is in progress.
//
// An engine writes the replies, in this tab (tab_engine.js) or on the server (server_engine.js). It has
//   chat(id, messages, settings, continueLast)  request a reply to messages [{role, content, thinking?}], or that the
//                                               last one is continued; a setting that is null: the model's default;
//                                               settings.schema, if there is one: the JSON Schema of the reply;
//                                               settings.tools, tool_choice: as in OpenAI's API; then messages may also
//                                               be calls {role: "assistant", content, tool_calls} and their results
//                                               {role: "tool", tool_call_id, name, content}
//   stop(id)                                    stop a reply; its done follows
//   mediaPart(attachment)                       return a promise of what stands for an attachment in a content, which
//                                               is text or a list of such parts and {type: "text", text}
// and dispatches events, whose details have the id of the reply:
//   waiting    reason: "loading" | "queued" | "reading"      why there is no text yet
//   encoding   media: ["image"?, "audio"?], done, total      repeatedly, before the first piece
//   canvas     runs: [[text, accepted]], number, step, accepted, size   a canvas of DiffusionGemma after a step
//   piece      text, thinking, usage     text of a reply; thinking: it belongs to the thoughts
//              usage: {prompt, reply, context, left_out, drafted?, accepted?} or null: tokens read, written so far and
//              that there is room for; left_out: how many messages, from the first that is not a system message, did
//              not fit; drafted: tokens that were drafted, accepted: those of them that remained
//   tool_call  name, arguments           a call of a tool in a reply
//   done       finish: "stop" | "length" | "stopped", tokens, tokens_per_second, usage
//   error      message, kind             the reply has failed; without an id, all has

import { contentOf } from "./attachments.js";
import { SYSTEM, withPassages } from "./citations.js";
import { randomId } from "./dom.js";
import { newId, rememberShown, shownId } from "./drafts.js";
import { beginRound, MAX_ROUNDS, sentCount, sentMessages, stopCalls } from "./rounds.js";
import { chatSettings, keepPending, pendingSettings, setOwn } from "./settings.js";
import { emptyConversation, isPinned, mark, pathOf, pathTo, titleOf } from "./tree.js";

const SAVE_MILLISECONDS = 500; // between two writes of a reply while it grows
const CUT = ["length", "stopped", "error", "unfinished"]; // ends of a reply that can be continued

/** Return the title of a conversation from its first message: the text, or the first attachment's name. */
const titleFrom = ({ content, attachments = [] }) => titleOf(content || attachments[0]?.name || "");

/** Whether a message is a reply that ended too early and can be continued; JSON would begin anew. */
export const canContinue = ({ role, content, thinking, rounds, tool_calls: calls, format, finish }) =>
  role === "assistant" && CUT.includes(finish) && Boolean(content || thinking || rounds?.length) && !calls?.length && !format;

/**
 * Holds the conversation that is shown and at most one reply in progress, which may belong to another
 * conversation. `view` has model(), which names the loaded model; opened(), when another conversation is shown;
 * changed(), grown(message), finished(message), notSent(error), removed(conversation), which another tab has deleted,
 * notRead(error), and passages(conversation, question), a promise of those that a reply is given (see citations.js) or
 * of null. `tools` makes the calls of tools (tools.js): a reply that calls some goes on with their results.
 */
export class Chat {
  constructor(engine, conversations, drafts, tools, view) {
    this.engine = engine;
    this.conversations = conversations;
    this.drafts = drafts;
    this.tools = tools;
    this.view = view;
    // {id, conversation, message, settings, indices, isSent, before, offered, calling, stage, canvas}; offered: names of
    // tools; calling: ends the calls in progress; the last two: details of events
    this.reply = null;
    this.failed = null; // the latest reply that ended with an error: {conversation, message}
    this.saveTimer = null;
    this.shownBefore = shownId(); // a reload
    this.opening = 0; // the number of the latest request to show a conversation
    for (const type of ["waiting", "encoding"]) engine.addEventListener(type, ({ detail }) => this.onState("stage", detail));
    engine.addEventListener("canvas", ({ detail }) => this.onState("canvas", detail));
    engine.addEventListener("piece", ({ detail }) => this.onPiece(detail));
    engine.addEventListener("tool_call", ({ detail }) => this.onToolCall(detail));
    engine.addEventListener("done", ({ detail }) => this.onDone(detail));
    conversations.addEventListener("changed", () => view.changed());
    conversations.addEventListener("removed", ({ detail }) => this.onRemoved(detail));
    conversations.addEventListener("purged", ({ detail }) => drafts.remove(detail.id));
    this.show(null);
  }

  /** Show what this tab has shown before a reload, else the latest conversation. */
  async start() {
    const { conversations, drafts, shownBefore: id } = this;
    const shown = conversations.get(id) ?? (id === this.newId() && drafts.has(id) ? null : conversations.list()[0]);
    await this.open(shown?.id);
  }

  /** The message in progress, if it belongs to the conversation that is shown. */
  get replying() {
    return this.reply?.conversation === this.conversation ? this.reply.message : null;
  }

  /** The messages that are shown. */
  get path() {
    return pathOf(this.conversation);
  }

  newId() {
    return newId((id) => this.conversations.get(id) !== undefined);
  }

  emptyConversation() {
    const conversation = emptyConversation(this.newId());
    const settings = pendingSettings(conversation.id);
    return settings ? { ...conversation, settings } : conversation;
  }

  /** Show a conversation, or the next one of this tab, which is stored with its first message. */
  show(conversation) {
    this.opening += 1;
    this.conversation = conversation ?? this.emptyConversation();
    this.conversations.shown = this.conversation;
    rememberShown(this.conversation.id);
  }

  /** Show a conversation once it is read; return whether it is shown. */
  async open(id) {
    this.opening += 1;
    const number = this.opening;
    const conversation = this.conversations.get(id);
    try {
      if (conversation) await this.conversations.complete(conversation);
    } catch (error) {
      this.view.notRead(error);
      return false;
    }
    if (number !== this.opening) return false; // another one was chosen meanwhile
    this.show(this.conversations.get(id));
    this.view.opened();
    return true;
  }

  /** Show a message of a conversation, also one of another version; return it. */
  async openAt(id, messageId) {
    if (!await this.open(id)) return null;
    const message = this.conversation.messages.get(messageId);
    if (message && !this.path.includes(message)) this.showVersion(message);
    return message ?? null;
  }

  startNew() {
    if (this.conversation.messages.size) this.show(null);
    this.view.opened();
  }

  /** Show another version of a message, with what follows it. */
  showVersion({ id }) {
    this.conversation.leaf = id;
    this.conversations.save(this.conversation);
    this.view.changed();
  }

  /** Add a message of the user, and request the reply. */
  send(text, attachments, settings) {
    this.sendAfter(this.path.at(-1)?.id ?? null, text, attachments, settings);
  }

  sendAfter(parent, text, attachments, settings) {
    const { conversation } = this;
    const message = this.add(parent, { role: "user", content: text });
    if (attachments.length) message.attachments = attachments;
    if (parent === null && conversation.title === titleOf("")) this.setTitle(conversation, titleFrom(message));
    this.startReply([message], settings);
  }

  /** Add another version of a message of the user, and request the reply. */
  edit(message, text, attachments, settings) {
    const { conversation } = this;
    if (this.reply) return;
    if (message.parent === null && conversation.title === titleFrom(message)) conversation.title = titleOf("");
    this.sendAfter(message.parent, text, attachments, settings);
  }

  /** Add another version of the last reply. */
  regenerate(settings) {
    const last = this.path.at(-1);
    if (this.reply || !last) return;
    this.conversation.leaf = last.role === "assistant" ? last.parent : last.id;
    this.startReply([], settings);
  }

  /** Continue the last reply where it was cut. */
  continueReply(settings) {
    const { path } = this;
    const message = path.at(-1);
    if (this.reply || !message || !canContinue(message)) return;
    const model = this.view.model();
    if (message.model && !message.model.split(", ").includes(model)) message.model += `, ${model}`;
    message.finish = "unfinished";
    stopCalls(message); // those that were cut: the model gets that as their result
    const isBegun = Boolean(message.content || message.thinking);
    this.generate(message, path, { ...settings, schema: "" }, [], isBegun); // its beginning kept to none
  }

  /** Write the reply that failed once more: continue what there is of it, or begin it again. */
  retry(settings) {
    const { conversation, message } = this.failed ?? {};
    if (this.reply || this.conversations.get(conversation?.id) !== conversation) return;
    this.show(conversation);
    conversation.leaf = message.id;
    const isBegun = message.tool_calls?.length || (message.format && (message.content || message.thinking));
    if (this.path.at(-1) !== message || isBegun) this.regenerate(settings);
    else if (canContinue(message)) this.continueReply(settings);
    else {
      Object.assign(message, { finish: "unfinished", model: this.view.model() });
      this.generate(message, pathTo(conversation, message.parent), settings, [], false);
    }
  }

  /** Return a new message of the conversation, which is shown. */
  add(parent, facts) {
    const message = { id: randomId(), parent, created: Date.now(), ...facts };
    this.conversation.messages.set(message.id, message);
    this.conversation.leaf = message.id;
    return message;
  }

  /** Add a reply to the message that is shown last, after `added`, which are new. */
  startReply(added, settings) {
    const parent = this.conversation.leaf;
    const path = pathTo(this.conversation, parent);
    const facts = { role: "assistant", content: "", finish: "unfinished", model: this.view.model() };
    this.generate(this.add(parent, facts), path, settings, added, false);
  }

  /** Request a reply to these messages, or that the last of them is continued. */
  generate(message, path, settings, added, isContinued) {
    const { conversation } = this;
    const before = path.includes(message) ? message.tokens ?? 0 : 0;
    if (settings.schema) message.format = "json"; // of a schema
    else delete message.format;
    this.reply = { conversation, message, settings, before, calling: null };
    conversation.updated = Date.now();
    this.conversations.held.add(message);
    this.conversations.elsewhere.delete(message);
    this.request(this.reply, path, isContinued);
    this.save(conversation, ...added, message);
    this.view.opened();
  }

  /** Note the passages that a new reply is given. */
  async findPassages(reply, question) {
    const { id, message, conversation } = reply;
    if (message.passages) return; // of the same reply, which failed
    this.onState("stage", { id, type: "waiting", reason: "searching" });
    const passages = await this.view.passages(conversation, question);
    if (passages) message.passages = passages;
    reply.stage = null;
  }

  /** Send these messages to the engine, after their audio is decoded and documents are searched. */
  async request(reply, path, isContinued) {
    const { conversation, message, settings } = reply;
    const isOpen = (each) => isContinued && each === message;
    const tools = this.tools.on(conversation);
    const isLast = (message.rounds ?? []).length >= MAX_ROUNDS;
    Object.assign(reply, {
      id: randomId(),
      indices: path.flatMap((each, i) => Array(sentCount(each, isOpen(each))).fill(i)),
      offered: isLast ? [] : tools,
      isSent: false,
      stage: null,
      canvas: null,
    });
    try {
      if (path.at(-1).role === "user") await this.findPassages(reply, path.at(-1).content);
      const passagesOf = ({ role }, at) => (role === "user" ? (path[at + 1] ?? message).passages : undefined);
      const messages = (await Promise.all(path.map(async (each, at) => {
        const content = await contentOf(each, (attachment) => this.engine.mediaPart(attachment));
        const passages = passagesOf(each, at);
        return sentMessages(each, passages ? withPassages(content, passages) : content, isOpen(each));
      }))).flat();
      const system = [settings.system.trim() && settings.system, path.some(passagesOf) && SYSTEM].filter(Boolean).join("\n\n");
      if (system) messages.unshift({ role: "system", content: system });
      if (this.reply !== reply) return; // stopped meanwhile
      reply.isSent = true;
      this.engine.chat(reply.id, messages, { ...chatSettings(settings), ...this.tools.settings(tools, isLast) }, isContinued);
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
  onState(name, detail) {
    if (detail.id !== this.reply?.id) return;
    this.reply[name] = detail;
    this.view.grown(this.reply.message);
  }

  onPiece({ id, text, thinking, usage }) {
    if (id !== this.reply?.id) return;
    const { message } = this.reply;
    this.reply.canvas = null; // its text follows as pieces
    this.noteThinking(thinking);
    if (thinking) message.thinking = (message.thinking ?? "") + text;
    else message.content += text;
    this.onGrown(usage);
  }

  /** Measure how long the model thinks: from its first thought on, until what it says or its end. */
  noteThinking(isThinking) {
    const { reply } = this;
    const now = performance.now();
    if (isThinking) reply.thinkingSince ??= now - 1000 * (reply.message.thinking_seconds ?? 0);
    if (reply.thinkingSince === undefined) return;
    reply.message.thinking_seconds = Math.round((now - reply.thinkingSince) / 100) / 10;
    if (!isThinking) delete reply.thinkingSince;
  }

  onToolCall({ id, name, arguments: given }) {
    if (id !== this.reply?.id) return;
    const { message } = this.reply;
    this.noteThinking(false);
    message.tool_calls = [...(message.tool_calls ?? []), { name, arguments: given }];
    this.onGrown();
  }

  onGrown(usage) {
    const { message, conversation } = this.reply;
    const wasLeftOut = message.usage?.left_out ?? 0;
    this.noteUsage(usage);
    if ((message.usage?.left_out ?? 0) === wasLeftOut) this.view.grown(message);
    else this.view.changed(); // which also shows what was left out
    this.saveTimer ??= setTimeout(() => this.save(conversation, message), SAVE_MILLISECONDS);
  }

  /** Note the tokens of a reply; `left_out` becomes the number of messages before the first that the model has read. */
  noteUsage(usage) {
    if (!usage) return;
    const { message, indices } = this.reply;
    message.usage = { ...usage, left_out: usage.left_out ? indices[usage.left_out] ?? 0 : 0 };
  }

  onDone({ id, finish, tokens, tokens_per_second, usage }) {
    if (id !== this.reply?.id) return;
    this.noteUsage(usage);
    const { reply } = this;
    const facts = { tokens: reply.before + tokens, tokens_per_second };
    if (finish === "stop" && reply.offered.length && reply.message.tool_calls?.length) this.callTools(reply, facts);
    else this.finish({ finish, ...facts });
  }

  /** Make the calls with which a reply ends, and request what follows their results. */
  async callTools(reply, facts) {
    const { conversation, message, offered } = reply;
    reply.calling = new AbortController();
    Object.assign(message, facts);
    Object.assign(reply, { before: facts.tokens, isSent: false, stage: null });
    const { signal } = reply.calling;
    const changed = () => {
      this.view.grown(message);
      this.save(conversation, message);
    };
    for (const call of beginRound(message)) {
      await this.tools.make(call, { conversation, offered, signal, changed });
      if (this.reply !== reply) return; // stopped
    }
    reply.calling = null;
    this.request(reply, pathTo(conversation, message.id), false);
  }

  /** End the reply as it is, also when the engine cannot report its end any more. */
  finish(facts) {
    if (!this.reply) return;
    const { message, conversation } = this.reply;
    this.noteThinking(false);
    this.endCalls();
    Object.assign(message, facts);
    if (facts.finish === "error") this.failed = { conversation, message };
    this.reply = null;
    this.save(conversation, message);
    this.conversations.held.delete(message);
    this.view.finished(message);
  }

  /** End the calls of the reply in progress, and a program that runs. */
  endCalls() {
    this.reply.calling?.abort();
    stopCalls(this.reply.message);
  }

  save(conversation, ...messages) {
    clearTimeout(this.saveTimer);
    this.saveTimer = null;
    this.conversations.save(conversation, ...messages);
  }

  /** Save at once what waits to be saved: the page is closing, or is suspended and may not be shown again. */
  saveNow(isClosing) {
    if (this.saveTimer !== null) this.save(this.reply.conversation, this.reply.message);
    if (isClosing) this.conversations.writeNow();
    this.drafts.write();
    if (isClosing) this.conversations.leave();
  }

  setTitle(conversation, title) {
    Object.assign(conversation, { title, titled: Date.now() });
  }

  /** Give a conversation settings of its own. */
  setSettings(conversation, values) {
    setOwn(conversation, values);
    if (this.conversations.get(conversation.id) === conversation) this.save(conversation);
    else keepPending(conversation);
    this.view.changed();
  }

  rename(id, title) {
    const conversation = this.conversations.get(id);
    if (!conversation) return; // another tab has deleted it meanwhile
    this.setTitle(conversation, title);
    this.save(conversation);
    this.view.changed();
  }

  /** Pin a conversation, or do so no longer. */
  pin(id) {
    const conversation = this.conversations.get(id);
    if (!conversation) return;
    if (isPinned(conversation)) mark(conversation, "unpinned", "pinned");
    else mark(conversation, "pinned", "unpinned");
    this.save(conversation);
    this.view.changed();
  }

  /** Delete a conversation; it can be restored for a while. */
  remove(id) {
    const conversation = this.conversations.get(id);
    if (!conversation) return;
    this.endReplyIn(conversation);
    this.conversations.remove(conversation);
    if (this.conversation === conversation) this.open(this.conversations.list()[0]?.id);
    else this.view.changed();
  }

  /** Another tab has deleted a conversation: say so if it was in use here. */
  async onRemoved(conversation) {
    const wasReplying = this.endReplyIn(conversation);
    const wasShown = this.conversation === conversation;
    if (wasShown) await this.open(this.conversations.list()[0]?.id);
    else this.view.changed();
    if (wasShown || wasReplying) this.view.removed(conversation);
  }

  /** Restore a deleted conversation, and show it if that is wanted. */
  restore(conversation, isShown) {
    this.conversations.restore(conversation);
    if (isShown) this.open(conversation.id);
    else this.view.changed();
  }

  /** Stop a reply in a conversation that is deleted; return whether there was one. */
  endReplyIn(conversation) {
    if (this.reply?.conversation !== conversation) return false;
    const { message } = this.reply;
    if (this.reply.isSent) this.engine.stop(this.reply.id);
    this.endCalls();
    message.finish = "stopped";
    this.reply = null;
    this.save(conversation, message); // it may be restored
    this.conversations.held.delete(message);
    return true;
  }
}
