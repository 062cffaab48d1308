// The messages of a conversation on the page.

import { shown } from "./attachments.js";
import { button, copyText, element } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { attachmentList } from "./tray.js";

const FINISH = { length: "cut at the limit", stopped: "stopped", error: "ended by an error" };

/** Facts about a finished reply: "42 tokens · 18.3 tokens/s". */
function replyFacts({ tokens, tokens_per_second: speed, finish }) {
  const facts = [];
  if (tokens) facts.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  if (speed) facts.push(`${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s`);
  if (FINISH[finish]) facts.push(FINISH[finish]);
  return facts.join(" · ");
}

const SENSING = { image: "Looking at what you sent …", audio: "Listening …", "image audio": "Looking and listening …" };

/** How far a reply is with looking and listening: "Listening … 40 %". */
function sensingText({ senses, done, total }) {
  return `${SENSING[senses.join(" ")]}${done && done < total ? ` ${Math.floor((100 * done) / total)} %` : ""}`;
}

/** A canvas that comes into focus: what is settled, noise, and how far it is. */
function canvasParts({ runs, block, step, settled, size }) {
  const parts = runs.map(([text, isSettled]) => element("span", isSettled ? "settled" : "noise", text));
  return [...parts, element("small", "", `block ${block}, step ${step}: ${settled} of ${size} settled`)];
}

/** `acts` has regenerate(), edit(message, text, attachments), and sensing() and canvas(): what the reply does so far. */
export class MessageList {
  constructor(list, acts) {
    this.list = list;
    this.acts = acts;
    this.items = new Map(); // by message
    list.addEventListener("click", (event) => {
      const copy = event.target.closest('[data-copy="code"]');
      if (copy) copyText(copy.closest("figure").querySelector("code").textContent, copy);
    });
  }

  /** Show these messages; the one in progress is `replying`. */
  show(messages, replying = null) {
    const before = this.items;
    this.items = new Map(messages.map((message) => [message, before.get(message) ?? this.item(message)]));
    for (const [message, { node }] of before) if (!this.items.has(message)) node.remove();
    for (const { node } of this.items.values()) if (!node.isConnected) this.list.append(node);
    for (const message of messages) this.update(message, message === replying);
    this.list.classList.toggle("replying", replying !== null);
  }

  /** A reply has grown or is finished. */
  update(message, isReplying) {
    const item = this.items.get(message);
    if (!item) return; // of another conversation
    item.node.classList.toggle("replying", isReplying);
    if (message.role === "user") {
      item.body.textContent = message.content;
      item.body.hidden = !message.content;
      return;
    }
    showMarkdown(item.body, message.content);
    item.thinking.hidden = !message.thinking;
    item.thoughts.textContent = message.thinking ?? "";
    item.summary.textContent = isReplying && !message.content ? "Thinking …" : "Thoughts";
    item.facts.textContent = isReplying ? "" : replyFacts(message);
    const isSilent = isReplying && !message.content && !message.thinking;
    const sensing = isSilent ? this.acts.sensing() : null;
    item.sensing.textContent = sensing ? sensingText(sensing) : "";
    const canvas = isReplying ? this.acts.canvas() : null;
    item.canvas.replaceChildren(...(canvas ? canvasParts(canvas) : []));
  }

  item(message) {
    const isUser = message.role === "user";
    const name = element("h3", "visually-hidden", isUser ? "You" : "Model");
    const body = element("div", "body");
    const actions = element("div", "actions", button("Copy", "quiet", ({ currentTarget }) =>
      copyText(message.content, currentTarget)));
    if (isUser) {
      const media = element("div", "media", (message.attachments ?? []).map((each) => shown(each, { isPlayable: true })));
      const item = { node: element("li", "message user", name, media, body, actions), media, body };
      actions.append(button("Edit", "quiet", () => this.edit(message, item, actions)));
      return item;
    }
    const again = button("Regenerate", "quiet regenerate", () => this.acts.regenerate());
    const facts = element("span", "facts");
    actions.append(again, facts);
    const summary = element("summary");
    const thoughts = element("div", "thoughts");
    const thinking = element("details", "thinking", summary, thoughts);
    const sensing = element("p", "sensing");
    sensing.role = "status";
    const canvas = element("div", "canvas");
    canvas.ariaHidden = "true"; // noise is nothing to listen to
    const node = element("li", "message assistant", name, sensing, thinking, body, canvas, actions);
    return { node, body, canvas, facts, sensing, summary, thinking, thoughts };
  }

  /** Put a message box in place of a message of the user. */
  edit(message, { node, media, body }, actions) {
    let attachments = message.attachments ?? [];
    const list = element("ul", "attachments");
    const showList = () => list.replaceChildren(...attachmentList(attachments, (gone) => {
      attachments = attachments.filter((other) => other !== gone);
      showList();
      box.focus();
    }));
    showList();
    const box = element("textarea");
    box.value = message.content;
    box.setAttribute("aria-label", "Edit your message; what follows it is cut");
    const close = () => {
      form.remove();
      media.hidden = false;
      body.hidden = !message.content;
      actions.hidden = false;
      actions.lastChild.focus();
    };
    const send = element("button", "", "Send");
    const form = element("form", "edit", list, box, element("div", "row", button("Cancel", "quiet", close), send));
    const submit = () => {
      const text = box.value.trim();
      if (text || attachments.length) this.acts.edit(message, text, attachments);
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      submit();
    });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        submit();
      }
    });
    media.hidden = true;
    body.hidden = true;
    actions.hidden = true;
    node.append(form);
    box.focus();
  }
}
