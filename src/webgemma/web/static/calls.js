// Calls of tools in a message: what the model asks for, whether it runs, and the result; and the question before.

import { button, element } from "./dom.js";
import { decimal, t } from "./language.js";
import { showMarkdown } from "./markdown.js";
import { isEnded, MAX_ROUNDS } from "./rounds.js";
import { thoughtsTitle } from "./thoughts.js";
import { labelOf } from "./tools.js";

const STATES = {
  waiting: () => t("waits for its turn"),
  asking: () => t("asks for your permission"),
  running: () => t("running …"),
  done: () => t("done"),
  refused: () => t("declined by you"),
  failed: () => t("failed"),
  stopped: () => t("stopped"),
  elsewhere: () => t("asks in another tab"),
  none: () => t("not run by this page"),
};
// Characters that could make a program look like another one: they change the direction of text, or are not shown.
const HIDDEN = /([\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0])/;

/** Return the children of an element that shows a text exactly, hidden characters by their numbers. */
const exactly = (text) => text.split(HIDDEN).map((part, i) =>
  (i % 2 ? element("mark", "", `U+${part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`) : part));

/** Return a box with a title and a text that scrolls. */
function box(title, text) {
  const pre = element("pre", "", element("code", "", exactly(text)));
  pre.tabIndex = 0;
  pre.ariaLabel = title;
  pre.role = "region";
  pre.dir = "ltr";
  return element("div", "box", element("small", "", title), pre);
}

/** Return what a call is given, as one reads it: the only argument alone, more of them as JSON. */
function givenText({ arguments: given }) {
  const values = Object.values(given);
  return values.length === 1 && typeof values[0] === "string" ? values[0] : JSON.stringify(given, null, 2);
}

const givenTitle = ({ name }) => (name === "python" ? t("Program") : t("Arguments"));

/** Return how a call stands: a call of a message that nobody is writing has ended. */
function stateOf(call, { isReplying, isElsewhere, isAsking }) {
  if (!call.state) return "none";
  if (isEnded(call)) return call.state;
  if (call.state === "asking" && isElsewhere) return "elsewhere";
  return (isReplying && (call.state !== "asking" || isAsking(call))) || isElsewhere ? call.state : "stopped";
}

function question(call, give) {
  const answer = (name, choice, className = "") => button(name, className, () => give(call, choice));
  const text = element("p", "", t("The model asks to run this program. It runs in this tab and reaches neither the network, this page nor your files."));
  const buttons = element("div", "answers", answer(t("Run once"), "once"), answer(t("Run always in this conversation"), "always", "quiet"), answer(t("Don’t run"), "no", "quiet"));
  const node = element("div", "asks", text, buttons);
  node.role = "group";
  node.ariaLabel = t("Run this program?");
  return node;
}

/** Return the element of a call in a state. */
function callElement(call, state, give) {
  const { name, result, seconds } = call;
  const facts = [STATES[state]()];
  if (isEnded({ state }) && seconds >= 0.05) facts.push(t("{seconds} s", { seconds: decimal(seconds, 1) }));
  const preview = name === "calculator" ? element("code", "preview", givenText(call)) : "";
  const summary = element("summary", "", element("strong", "", labelOf(name)), preview, element("span", "state", facts.join(" · ")));
  const node = element("details", `call ${state}`, summary, box(givenTitle(call), givenText(call)));
  if (state === "asking") node.append(question(call, give));
  if (state === "done" || state === "failed") node.append(box(t("Result"), result));
  node.open = state === "asking" || state === "none";
  return node;
}

const shown = new WeakMap(); // by call: {node, state}

/** Return the element of a call as it stands, the same as before if nothing has changed. */
function current(call, context) {
  const state = stateOf(call, context);
  const before = shown.get(call);
  if (before?.state === state && before.list === context.list) return before.node;
  const node = callElement(call, state, context.give);
  if (before?.node.contains(document.activeElement)) setTimeout(() => node.querySelector("summary").focus()); // once it is in its place
  shown.set(call, { node, state, list: context.list });
  return node;
}

function replace(list, nodes) {
  if (nodes.length !== list.children.length || nodes.some((node, i) => list.children[i] !== node)) list.replaceChildren(...nodes);
}

/** Show calls in a list; `context` has isReplying, isElsewhere, isAsking(call) and give(call, answer). */
export function showCalls(list, calls, context) {
  replace(list, calls.map((call) => current(call, { ...context, list })));
}

const roundNodes = new WeakMap(); // by round

/** Return the element of a round, without its calls: what the model thought and wrote before them. */
function roundNode(round) {
  if (!roundNodes.has(round)) {
    const { thinking, content } = round;
    const body = element("div", "body");
    const calls = element("div", "calls");
    const thoughts = element("details", "thinking", element("summary", "", thoughtsTitle(round, false)), element("div", "thoughts", thinking ?? ""));
    thoughts.hidden = !thinking;
    body.hidden = !content;
    showMarkdown(body, content);
    roundNodes.set(round, { node: element("div", "round", thoughts, body, calls), calls });
  }
  return roundNodes.get(round);
}

/** Show the rounds of a message, and say so if they are as many as there may be. */
export function showRounds(list, { rounds = [] }, context) {
  const nodes = rounds.map((round) => {
    const { node, calls } = roundNode(round);
    showCalls(calls, round.calls, context);
    return node;
  });
  const isLast = rounds.length >= MAX_ROUNDS;
  if (isLast) nodes.push(shownLimit(list));
  replace(list, nodes);
}

const limits = new WeakMap(); // by list

function shownLimit(list) {
  if (!limits.has(list)) limits.set(list, element("p", "faint", t("The model has called tools {count} times in this reply, as often as it may: it has to answer now.", { count: MAX_ROUNDS })));
  return limits.get(list);
}
