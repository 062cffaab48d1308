// One conversation as a file to keep or to pass on: Markdown, or an HTML page that needs nothing else.

import { placeIn } from "./citations.js";
import { shownName } from "./document_text.js";
import { element, saveBlob } from "./dom.js";
import { indented } from "./json.js";
import { language, t } from "./language.js";
import { allDone } from "./later.js";
import { showCode, showMarkdown } from "./markdown.js";
import { thoughtsTitle } from "./thoughts.js";

const COLOURS = ["--ground", "--card", "--line", "--ink", "--faint", "--accent", "--user", "--code"];
const POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";
const MAX_NAME = 60; // characters of a file's name

const date = (milliseconds) => new Date(milliseconds).toLocaleString(language, { dateStyle: "long", timeStyle: "short" });
const authorOf = ({ role, model }) => (role === "user" ? t("You") : model ?? t("Model"));
const namesOf = ({ attachments = [] }) => attachments.map(({ name }) => name);
const isJson = ({ format, content }) => format === "json" && content;

/** Return the rounds of a message, and what follows the last one as another. */
const stepsOf = ({ rounds = [], tool_calls: calls = [], ...rest }) => [...rounds, { ...rest, calls }];

/** Return the passages that a reply was given, by the numbers that it cites. */
const sourcesOf = ({ passages = [] }) => passages.map((passage, at) => `[${at + 1}] ${shownName(passage.name)}, ${placeIn(passage)}`);

// Markdown

const escaped = (text) => text.replace(/\s+/g, " ").replace(/[\\`*_[\]<>#]/g, "\\$&");

/** Return text as a block of code, within more backticks than it has in a row. */
function fenced(text, label) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${label}\n${text}\n${fence}`;
}

function markdownCall({ name, arguments: given, result }) {
  const parts = [`**${t("Tool call: {name}", { name: escaped(name) })}**`, fenced(JSON.stringify(given, null, 2), "json")];
  if (result) parts.push(fenced(result, ""));
  return parts;
}

/** Return what the model thought, wrote and called in a round, or in what follows the last one. */
function markdownRound({ thinking, content, calls, format }) {
  const parts = [];
  if (thinking) parts.push(`> **${t("Thoughts")}**\n>\n${thinking.trim().split("\n").map((line) => `> ${line}`).join("\n")}`);
  if (content) parts.push(isJson({ format, content }) ? fenced(indented(content), "json") : content.trim());
  return [...parts, ...calls.flatMap(markdownCall)];
}

function markdownMessage(message) {
  const parts = [`## ${escaped(authorOf(message))}`, `*${date(message.created)}*`];
  const names = namesOf(message);
  if (names.length) parts.push(t("Attachments: {names}", { names: names.map(escaped).join(", ") }));
  parts.push(...stepsOf(message).flatMap(markdownRound));
  const sources = sourcesOf(message);
  if (sources.length) parts.push(`**${t("Sources")}**`, sources.map((source) => `- ${escaped(source)}`).join("\n"));
  return parts.join("\n\n");
}

/** Return a conversation's messages, those of `path`, as Markdown. */
function markdownOf(conversation, path) {
  const head = `# ${escaped(conversation.title)}\n\n*${date(conversation.created)} · webgemma*`;
  return `${[head, ...path.map(markdownMessage)].join("\n\n")}\n`;
}

// HTML

/** Return what was said in a step, as the page shows it, without its buttons. */
async function bodyOf({ content, format, calls }, isUser) {
  const body = element("div", "body");
  body.dir = "auto";
  if (isUser) body.append(content);
  else if (isJson({ format, content })) showCode(body, indented(content), "json");
  else showMarkdown(body, content);
  for (const { name, arguments: given, result } of calls) {
    const title = element("figcaption", "", t("Tool call: {name}", { name }));
    const boxes = [JSON.stringify(given, null, 2), ...(result ? [result] : [])].map((text) => element("pre", "", element("code", "", text)));
    body.append(element("figure", "code", title, ...boxes));
  }
  await allDone();
  for (const button of body.querySelectorAll("button")) button.remove();
  return body;
}

async function messageElement(message) {
  const time = element("time", "", date(message.created));
  time.dateTime = new Date(message.created).toISOString();
  const node = element("article", `message ${message.role === "user" ? "user" : "assistant"}`, element("h2", "", authorOf(message), " ", time));
  const names = namesOf(message);
  if (names.length) node.append(element("p", "attachments", t("Attachments: {names}", { names: names.join(", ") })));
  for (const step of stepsOf(message)) {
    if (step.thinking) {
      const thoughts = element("div", "thoughts", step.thinking);
      node.append(element("details", "thinking", element("summary", "", thoughtsTitle(step, false)), thoughts));
    }
    node.append(await bodyOf(step, message.role === "user"));
  }
  const sources = sourcesOf(message);
  if (sources.length) node.append(element("h3", "", t("Sources")), element("ul", "", sources.map((source) => element("li", "", source))));
  return node;
}

async function styleText(name) {
  const response = await fetch(new URL(name, import.meta.url));
  if (!response.ok) throw new Error(t("{name} could not be read from this page’s server.", { name }));
  return response.text();
}

async function styles(hasFormulas) {
  const own = getComputedStyle(document.documentElement);
  const colours = COLOURS.map((name) => `${name}: ${own.getPropertyValue(name)};`).join(" ");
  const files = ["markdown.css", "transcript.css"];
  if (hasFormulas) files.unshift("lib/temml/Temml-Local.css");
  const texts = await Promise.all(files.map(styleText));
  return [`:root { color-scheme: light dark; ${colours} }`, ...texts].join("\n").replace(/@font-face\s*{[^}]*}/g, "");
}

/** Return a conversation's messages, those of `path`, as an HTML page: as here, with its styles and without scripts. */
async function htmlOf(conversation, path) {
  const main = element("main", "", element("h1", "", conversation.title), element("p", "facts", `${date(conversation.created)} · webgemma`));
  for (const message of path) main.append(await messageElement(message));
  const head = element("head");
  const meta = (attributes) => {
    const node = element("meta");
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  head.append(
    meta({ charset: "utf-8" }),
    meta({ "http-equiv": "Content-Security-Policy", content: POLICY }),
    meta({ name: "referrer", content: "no-referrer" }),
    meta({ name: "viewport", content: "width=device-width, initial-scale=1" }),
    meta({ name: "generator", content: "webgemma" }),
    element("title", "", conversation.title),
  );
  const css = await styles(main.querySelector("math") !== null);
  const { lang, dir } = document.documentElement;
  // The style is put in as text: as a node of this page, its policy would refuse it.
  return `<!doctype html>\n<html lang="${lang}" dir="${dir}">\n<head>${head.innerHTML}\n<style>\n${css}</style>\n</head>\n<body>\n${main.outerHTML}\n</body>\n</html>\n`;
}

const FORMATS = {
  md: { type: "text/markdown", write: markdownOf },
  html: { type: "text/html", write: htmlOf },
};

/** Download a conversation's messages, those of `path`, in a format: "md" or "html". */
export async function saveTranscript(conversation, path, format) {
  const { type, write } = FORMATS[format];
  const text = await write(conversation, path);
  const name = conversation.title.replace(/[\\/:*?"<>|\p{Cc}\p{Cf}]/gu, " ").trim().slice(0, MAX_NAME).replace(/[. ]+$/, "");
  saveBlob(new Blob([text], { type: `${type};charset=utf-8` }), `${name || "conversation"}.${format}`);
}
