// The conversation on the page: its messages, and scrolling.

import { attachmentElement, attachmentList } from "./attachments.js";
import { showCalls, showRounds } from "./calls.js";
import { canContinue } from "./chat.js";
import { button, copyText, element } from "./dom.js";
import { indented } from "./json.js";
import { decimal, plural, t } from "./language.js";
import { showCode, showMarkdown } from "./markdown.js";
import { readButton } from "./speech.js";
import { thoughtsTitle } from "./thoughts.js";

const FINISH = {
  length: t("stopped at the token limit"),
  stopped: t("stopped"),
  error: t("ended with an error"),
  unfinished: t("not finished"),
};
const WAITING = {
  searching: () => t("Searching your documents …"),
  loading: (model) => t("Loading {model} …", { model }),
  queued: () => t("Waiting for other replies of this server to end …"),
  reading: () => t("Reading the conversation …"),
};
const ENCODING = {
  image: t("Processing images …"),
  audio: t("Processing audio …"),
  "image audio": t("Processing images and audio …"),
};
const NEAR_PIXELS = 48; // from the end, where the view follows a growing reply

/** Return facts about a finished reply: "42 tokens · 18.3 tokens/s". */
function replyFacts({ tokens, tokens_per_second: speed, finish }) {
  const facts = [];
  if (tokens) facts.push(plural(tokens, "{count} token", "{count} tokens"));
  if (speed) facts.push(t("{speed} tokens/s", { speed: decimal(speed, speed < 100 ? 1 : 0) }));
  if (FINISH[finish]) facts.push(FINISH[finish]);
  return facts.join(" · ");
}

/** Return how many of a reply's tokens were drafted, which made it faster: "12 of 20 drafted tokens were accepted"; or "". */
const draftFacts = ({ usage }) => (usage?.drafted ? t("{accepted} of {drafted} drafted tokens were accepted", usage) : "");

/** Return what a user copies of a message: its text, or the calls of tools that it consists of. */
const textOf = ({ content, tool_calls: calls }) => content || (calls?.length ? JSON.stringify(calls, null, 1) : "");

/** Return the line below the messages that the model has not read. */
const leftOutText = (count) => plural(
  count,
  "The message above no longer fits the context; the model did not read it.",
  "The {count} messages above no longer fit the context; the model did not read them.",
);

/** Return what a reply without text waits for: "Loading gemma4:e2b …", "Processing audio … 40 %". */
function stageText({ type, reason, media, done, total }, model) {
  if (type === "waiting") return WAITING[reason](model);
  return `${ENCODING[media.join(" ")]}${done && done < total ? ` ${Math.floor((100 * done) / total)} %` : ""}`;
}

/** Return the elements of a canvas: accepted text, noise, and how many tokens are accepted. */
function canvasElements({ runs, number, step, accepted, size }) {
  const texts = runs.map(([text, isAccepted]) => element("span", isAccepted ? "accepted" : "noise", text));
  return [...texts, element("small", "", t("Canvas {number}, step {step}: {accepted} of {size} tokens accepted", { number, step, accepted, size }))];
}

/** Lead from a footnote's number to the footnote, or back. */
function goToNote(event, link, list) {
  event.preventDefault();
  const target = list.querySelector(`#${CSS.escape(link.getAttribute("href").slice(1))}`);
  if (!target) return;
  if (target.localName !== "a") target.tabIndex = -1; // focusable by scripts
  target.focus({ preventScroll: true });
  target.scrollIntoView({ block: "nearest" });
}

/**
 * The list of messages. `actions` has regenerate(), continueReply(), edit(message, text, attachments) and
 * showVersion(message); isElsewhere(message), whether another tab is writing it; isAsking(call) and give(call, answer)
 * for calls that ask the user; stage() and canvas(), which return the details of the engine's latest such event for the
 * reply in progress; and citations(body, message, isReplying), which makes links of those in the body of a reply.
 */
export class MessageList {
  constructor(list, actions) {
    this.list = list;
    this.actions = actions;
    this.items = new Map(); // by message
    this.leftOut = element("li", "left-out");
    list.addEventListener("click", (event) => {
      const copy = event.target.closest('[data-copy="code"]');
      if (copy) copyText(copy.closest("figure").querySelector("code").textContent, copy);
      const note = event.target.closest('.body a[href^="#"]'); // of a footnote: the page's address stays as it is
      if (note) goToNote(event, note, list);
    });
  }

  /**
   * Show these messages; `replying` is the one in progress, `children` lists the messages that follow each one, and
   * the model has not read the first `leftOut`.
   */
  show(messages, { replying = null, children = new Map(), leftOut = 0 } = {}) {
    const before = this.items;
    this.items = new Map(messages.map((message) => [message, before.get(message) ?? this.item(message)]));
    for (const [message, { node }] of before) if (!this.items.has(message)) node.remove();
    const nodes = [...this.items.values()].map(({ node }) => node);
    if (leftOut) nodes.splice(leftOut, 0, this.leftOut);
    else this.leftOut.remove();
    this.leftOut.textContent = leftOut ? leftOutText(leftOut) : "";
    nodes.forEach((node, i) => {
      if (this.list.children[i] !== node) this.list.insertBefore(node, this.list.children[i] ?? null);
    });
    messages.forEach((message, i) => {
      this.update(message, message === replying);
      this.showVersions(message, children.get(messages[i - 1]?.id ?? null) ?? []);
    });
    this.list.classList.toggle("replying", replying !== null);
  }

  /** Show which of its versions a message is. */
  showVersions(message, versions) {
    const { versions: node } = this.items.get(message);
    const at = versions.indexOf(message);
    const text = `${at + 1}/${versions.length}`;
    node.hidden = versions.length < 2;
    if (node.hidden || node.children[1]?.textContent === text) return; // the arrows keep the focus
    const arrow = (name, label, target) => {
      const item = button(name, "quiet", () => {
        this.actions.showVersion(target);
        const arrows = [...this.items.get(target).versions.querySelectorAll("button:enabled")];
        (arrows.find(({ ariaLabel }) => ariaLabel === label) ?? arrows[0]).focus();
      });
      item.ariaLabel = label;
      item.disabled = !target;
      return item;
    };
    const count = element("span", "", text);
    count.title = t("Version {number} of {count}", { number: at + 1, count: versions.length });
    node.replaceChildren(arrow("‹", t("Previous version"), versions[at - 1]), count, arrow("›", t("Next version"), versions[at + 1]));
  }

  /** Show the current state of a message. */
  update(message, isReplying) {
    const item = this.items.get(message);
    if (!item) return; // of another conversation
    item.node.classList.toggle("replying", isReplying);
    if (message.role === "user") {
      item.body.textContent = message.content;
      item.body.hidden = !message.content || item.isEditing;
      return;
    }
    const isElsewhere = this.actions.isElsewhere(message);
    const growth = { isGrowing: isReplying || isElsewhere };
    if (message.format === "json" && message.content) showCode(item.body, indented(message.content), "json", growth);
    else showMarkdown(item.body, message.content, growth);
    this.actions.citations(item.body, message, isReplying);
    item.thinking.hidden = !message.thinking;
    item.thoughts.textContent = message.thinking ?? "";
    item.summary.textContent = thoughtsTitle(message, isReplying);
    const { isAsking, give } = this.actions;
    showRounds(item.rounds, message, { isReplying, isElsewhere, isAsking, give });
    showCalls(item.calls, message.tool_calls ?? [], { isReplying, isElsewhere, isAsking, give });
    item.facts.textContent = isReplying ? "" : isElsewhere ? t("being written in another tab") : replyFacts(message);
    item.facts.title = isReplying ? "" : draftFacts(message);
    item.author.textContent = isReplying ? "" : message.model ?? "";
    item.name.textContent = message.model ?? t("Model");
    item.proceed.hidden = isElsewhere || !canContinue(message);
    const isEmpty = isReplying && !message.content && !message.thinking && !message.tool_calls?.length;
    const stage = isEmpty ? this.actions.stage() : null;
    item.stage.textContent = stage ? stageText(stage, message.model) : "";
    const canvas = isReplying ? this.actions.canvas() : null;
    item.canvas.replaceChildren(...(canvas ? canvasElements(canvas) : []));
  }

  item(message) {
    const isUser = message.role === "user";
    const name = element("h3", "visually-hidden", isUser ? t("You") : t("Model"));
    const body = element("div", "body");
    const buttons = element("div", "actions", button(t("Copy"), "quiet", ({ currentTarget }) =>
      copyText(textOf(message), currentTarget)));
    const versions = element("div", "versions");
    versions.role = "group";
    versions.ariaLabel = t("Versions");
    if (isUser) {
      const media = element("div", "media", (message.attachments ?? []).map((each) => attachmentElement(each, { isPlayable: true })));
      const foot = element("div", "foot", buttons, versions);
      const item = { node: element("li", "message user", name, media, body, foot), media, body, foot, versions, isEditing: false };
      const edit = button(t("Edit"), "quiet", () => this.edit(message, item, edit));
      item.startEdit = () => edit.click();
      buttons.append(edit);
      return item;
    }
    const regenerate = button(t("Regenerate"), "quiet regenerate", () => this.actions.regenerate());
    const proceed = button(t("Continue"), "quiet continue", () => this.actions.continueReply());
    const facts = element("span", "facts");
    const author = element("span", "author");
    buttons.prepend(versions);
    buttons.append(readButton(body), regenerate, proceed, element("div", "about", facts, author));
    const summary = element("summary");
    const thoughts = element("div", "thoughts");
    const thinking = element("details", "thinking", summary, thoughts);
    const stage = element("p", "stage");
    stage.role = "status";
    const canvas = element("div", "canvas");
    canvas.ariaHidden = "true"; // screen readers should not read noise
    const rounds = element("div", "rounds");
    const calls = element("div", "calls");
    const node = element("li", "message assistant", name, rounds, stage, thinking, body, calls, canvas, buttons);
    return { node, name, rounds, body, calls, canvas, facts, author, proceed, versions, stage, summary, thinking, thoughts };
  }

  /** Edit the last message of the user; return whether there is one. */
  editLast() {
    const [item] = [...this.items.values()].filter(({ foot }) => foot).slice(-1);
    if (item && !item.isEditing) item.startEdit();
    return Boolean(item);
  }

  /** Replace a message of the user by a form to edit it. */
  edit(message, item, editButton) {
    const { node, media, body, foot } = item;
    let attachments = message.attachments ?? [];
    const list = element("ul", "attachments");
    const showList = () => list.replaceChildren(...attachmentList(attachments, (removed) => {
      attachments = attachments.filter((other) => other !== removed);
      showList();
      box.focus();
    }));
    showList();
    const box = element("textarea");
    box.dir = "auto";
    box.value = message.content;
    box.setAttribute("aria-label", t("Edit your message; this version and what follows it are kept"));
    const close = () => {
      form.remove();
      item.isEditing = false;
      media.hidden = false;
      body.hidden = !message.content;
      foot.hidden = false;
      editButton.focus();
    };
    const send = element("button", "", t("Send"));
    const form = element("form", "edit", list, box, element("div", "row", button(t("Cancel"), "quiet", close), send));
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
    item.isEditing = true;
    media.hidden = true;
    body.hidden = true;
    foot.hidden = true;
    node.append(form);
    box.focus();
  }
}

/** Keeps the end of the conversation visible, unless the user has scrolled up. */
export class Scroller {
  constructor(area, toEndButton) {
    this.area = area;
    this.toEndButton = toEndButton;
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

  toStart() {
    this.isAtEnd = false;
    this.area.scrollTop = 0;
  }

  /** Scroll to the end if the user was there. */
  follow() {
    if (!this.isAtEnd) return;
    this.area.scrollTop = this.area.scrollHeight;
    this.toEndButton.hidden = true; // where nothing scrolls, no event says so
  }
}
