// The conversation on the page: its messages, and scrolling.

import { attachmentElement, attachmentList } from "./attachments.js";
import { button, copyText, element } from "./dom.js";
import { showMarkdown } from "./markdown.js";

const FINISH = { length: "stopped at the token limit", stopped: "stopped", error: "ended with an error" };
const ENCODING = { image: "Processing images …", audio: "Processing audio …", "image audio": "Processing images and audio …" };
const NEAR_PIXELS = 48; // from the end, where the view follows a growing reply

/** Return facts about a finished reply: "42 tokens · 18.3 tokens/s". */
function replyFacts({ tokens, tokens_per_second: speed, finish }) {
  const facts = [];
  if (tokens) facts.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  if (speed) facts.push(`${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s`);
  if (FINISH[finish]) facts.push(FINISH[finish]);
  return facts.join(" · ");
}

/** Return the progress of encoding a prompt's media: "Processing audio … 40 %". */
function encodingText({ media, done, total }) {
  return `${ENCODING[media.join(" ")]}${done && done < total ? ` ${Math.floor((100 * done) / total)} %` : ""}`;
}

/** Return the elements of a canvas: accepted text, noise, and how many tokens are accepted. */
function canvasElements({ runs, number, step, accepted, size }) {
  const texts = runs.map(([text, isAccepted]) => element("span", isAccepted ? "accepted" : "noise", text));
  return [...texts, element("small", "", `Canvas ${number}, step ${step}: ${accepted} of ${size} tokens accepted`)];
}

/**
 * The list of messages. `actions` has regenerate() and edit(message, text, attachments), and encoding() and
 * canvas(), which return the engine's latest message of that type for the reply in progress.
 */
export class MessageList {
  constructor(list, actions) {
    this.list = list;
    this.actions = actions;
    this.items = new Map(); // by message
    list.addEventListener("click", (event) => {
      const copy = event.target.closest('[data-copy="code"]');
      if (copy) copyText(copy.closest("figure").querySelector("code").textContent, copy);
    });
  }

  /** Show these messages; `replying` is the one in progress. */
  show(messages, replying = null) {
    const before = this.items;
    this.items = new Map(messages.map((message) => [message, before.get(message) ?? this.item(message)]));
    for (const [message, { node }] of before) if (!this.items.has(message)) node.remove();
    for (const { node } of this.items.values()) if (!node.isConnected) this.list.append(node);
    for (const message of messages) this.update(message, message === replying);
    this.list.classList.toggle("replying", replying !== null);
  }

  /** Show the current state of a message. */
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
    const isEmpty = isReplying && !message.content && !message.thinking;
    const encoding = isEmpty ? this.actions.encoding() : null;
    item.encoding.textContent = encoding ? encodingText(encoding) : "";
    const canvas = isReplying ? this.actions.canvas() : null;
    item.canvas.replaceChildren(...(canvas ? canvasElements(canvas) : []));
  }

  item(message) {
    const isUser = message.role === "user";
    const name = element("h3", "visually-hidden", isUser ? "You" : "Model");
    const body = element("div", "body");
    const buttons = element("div", "actions", button("Copy", "quiet", ({ currentTarget }) =>
      copyText(message.content, currentTarget)));
    if (isUser) {
      const media = element("div", "media", (message.attachments ?? []).map((each) => attachmentElement(each, { isPlayable: true })));
      const item = { node: element("li", "message user", name, media, body, buttons), media, body };
      buttons.append(button("Edit", "quiet", () => this.edit(message, item, buttons)));
      return item;
    }
    const regenerate = button("Regenerate", "quiet regenerate", () => this.actions.regenerate());
    const facts = element("span", "facts");
    buttons.append(regenerate, facts);
    const summary = element("summary");
    const thoughts = element("div", "thoughts");
    const thinking = element("details", "thinking", summary, thoughts);
    const encoding = element("p", "encoding");
    encoding.role = "status";
    const canvas = element("div", "canvas");
    canvas.ariaHidden = "true"; // screen readers should not read noise
    const node = element("li", "message assistant", name, encoding, thinking, body, canvas, buttons);
    return { node, body, canvas, facts, encoding, summary, thinking, thoughts };
  }

  /** Replace a message of the user by a form to edit it. */
  edit(message, { node, media, body }, buttons) {
    let attachments = message.attachments ?? [];
    const list = element("ul", "attachments");
    const showList = () => list.replaceChildren(...attachmentList(attachments, (removed) => {
      attachments = attachments.filter((other) => other !== removed);
      showList();
      box.focus();
    }));
    showList();
    const box = element("textarea");
    box.value = message.content;
    box.setAttribute("aria-label", "Edit your message; everything after it will be removed");
    const close = () => {
      form.remove();
      media.hidden = false;
      body.hidden = !message.content;
      buttons.hidden = false;
      buttons.lastChild.focus();
    };
    const send = element("button", "", "Send");
    const form = element("form", "edit", list, box, element("div", "row", button("Cancel", "quiet", close), send));
    const submit = () => {
      const text = box.value.trim();
      if (text || attachments.length) this.actions.edit(message, text, attachments);
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
    buttons.hidden = true;
    node.append(form);
    box.focus();
  }
}

/** Keeps the end of the conversation visible, unless the user has scrolled up. */
export class Scroller {
  constructor(area, toEndButton) {
    this.area = area;
    this.isAtEnd = true;
    area.addEventListener("scroll", () => {
      this.isAtEnd = area.scrollHeight - area.scrollTop - area.clientHeight < NEAR_PIXELS;
      toEndButton.hidden = this.isAtEnd;
    }, { passive: true });
    toEndButton.addEventListener("click", () => this.toEnd());
    const observer = new ResizeObserver(() => this.follow());
    for (const node of [area, ...area.children]) observer.observe(node); // an on-screen keyboard, a loaded image
  }

  toEnd() {
    this.isAtEnd = true;
    this.follow();
  }

  /** Scroll to the end if the user was there. */
  follow() {
    if (this.isAtEnd) this.area.scrollTop = this.area.scrollHeight;
  }
}
