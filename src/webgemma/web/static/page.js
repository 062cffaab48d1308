// Joins the parts of the page: the worker's messages, the conversation, the dialogs.

import { exportFile, importFile } from "./archive.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { Conversations } from "./conversations.js";
import { byId, humanSize } from "./dom.js";
import { takeDrops } from "./drops.js";
import { Engine } from "./engine.js";
import { lastModel, rememberModel } from "./last.js";
import { endLoading, showProgress, startLoading } from "./loading.js";
import { MessageList } from "./messages.js";
import { Microphone } from "./microphone.js";
import { BUNDLED, ModelPicker } from "./models.js";
import { errorSentence, hideNotice, noticeText, showNotice } from "./notice.js";
import { keepPage } from "./offline.js";
import { Scroller } from "./scroller.js";
import { loadOptions, readSettings, SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Tray } from "./tray.js";

const conversations = new Conversations();
const unkept = await conversations.open();
if (unkept) showNotice(unkept);

const engine = new Engine();
const settings = new SettingsDialog(readSettings(), (now, before) => {
  if (now.context === before.context || engine.state === "empty") return;
  showNotice("The new context counts once the model is loaded again.", actions.again);
});
const picker = new ModelPicker(engine, load);
const scroller = new Scroller(byId("scroller"), byId("to-end"));
const messages = new MessageList(byId("messages"), {
  regenerate: () => mayAsk() && chat.regenerate(settings.settings),
  edit: (message, text, attachments) => mayAsk() && chat.edit(message, text, attachments, settings.settings),
  sensing: () => chat.reply?.sensing,
  canvas: () => chat.reply?.canvas,
});
const composer = new Composer({
  send(text) {
    if (!mayAsk()) return false;
    chat.send(text, tray.take(), settings.settings);
    return true;
  },
  stop: () => microphone.end(false) || chat.stop(),
}, () => tray.attachments.length > 0);
const tray = new Tray(() => composer.show(chat.reply !== null, canSend()), showNotice);
const microphone = new Microphone((file) => tray.add([file]), showNotice);
takeDrops((files) => picker.files.hear(files), (files) => tray.add(files));
const sidebar = new Sidebar({
  open: (id) => chat.open(id),
  rename: (id, title) => chat.rename(id, title),
  remove: (id) => chat.remove(id),
});

let frame = 0; // the next one that shows what has grown
const chat = new Chat(engine, conversations, {
  changed() {
    byId("announcer").textContent = ""; // so that the same reply is news again
    refresh();
    scroller.toEnd();
    composer.focus();
  },
  grown(message) {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      messages.update(message, chat.reply?.message === message);
      scroller.follow();
    });
  },
  finished(message) {
    byId("announcer").textContent = `The model says: ${message.content}`;
    refresh();
    scroller.follow();
  },
  notSent: (error) => showNotice(error.message),
  notKept: (error) => showNotice(`This conversation could not be kept (${error.message}): export it.`),
});

function canSend() {
  return engine.state === "loaded" && chat.reply === null && !tray.reading;
}

/** Whether the model can be asked; says so where there is none and nothing on the page tells why. */
function mayAsk() {
  if (engine.state === "empty" && byId("notice").hidden) showNotice("There is no model to answer.", actions.again);
  return canSend();
}

/** Show the state as it is. */
function refresh() {
  const { conversation } = chat;
  messages.show(conversation.messages, chat.replying);
  byId("welcome").hidden = conversation.messages.length > 0;
  sidebar.show(conversations.list(), conversation.id);
  composer.show(chat.reply !== null, canSend());
  document.title = conversation.messages.length ? `${conversation.title} – webgemma` : "webgemma";
}

// Models

let wanted = BUNDLED; // the model that was chosen last
let computer = ""; // what the worker computes on
const actions = {
  again: { name: "Load the model again", act: () => { engine.restart(); load(wanted); } },
  choose: { name: "Choose a model", act: () => picker.open() },
};

function load(model) {
  wanted = model;
  rememberModel(model, false);
  chat.stop();
  chat.finish({ finish: "stopped" });
  hideNotice();
  showModel("no model", "");
  startLoading(model.name);
  engine.load(model.source, loadOptions(settings.settings));
  refresh();
}

function showModel(name, device, hint = "") {
  picker.current = engine.state === "loaded" ? wanted : null;
  byId("model-name").textContent = name;
  byId("model-button").title = hint;
  byId("device").textContent = device;
}

engine.addEventListener("ready", ({ detail }) => {
  computer = detail.device + (detail.software ? " (software, slow)" : "");
});
engine.addEventListener("progress", ({ detail }) => showProgress(detail));
engine.addEventListener("loaded", ({ detail }) => {
  endLoading();
  rememberModel(wanted, true);
  const hint = `${detail.name}: context of ${detail.context} tokens, ${humanSize(detail.nbytes)} of memory`;
  showModel(wanted.name, `${computer || detail.device} · ${humanSize(detail.nbytes)}`, hint);
  refresh();
});
engine.addEventListener("loaded", keepPage, { once: true });
engine.addEventListener("error", ({ detail }) => {
  if (detail.keep !== undefined) return; // keeping.js tells
  if (engine.state === "empty") {
    endLoading();
    showModel("no model", "");
    showNotice(errorSentence(detail), ["file", "storage", "memory"].includes(detail.kind) ? actions.choose : actions.again);
    if (detail.kind === "memory") offerFitting(errorSentence(detail));
  } else {
    showNotice(errorSentence(detail));
  }
  chat.finish({ finish: "error" });
  refresh();
});

/** Add to the notice what would fit, once that is known. */
async function offerFitting(sentence) {
  const names = (await picker.fitting()).filter((name) => name !== wanted.name);
  if (noticeText() === sentence) showNotice(`${sentence} These would fit: ${names.join(", ")}.`, actions.choose);
}

byId("loading-cancel").addEventListener("click", () => {
  engine.restart();
  endLoading();
  showNotice(`${wanted.name} was not loaded.`, actions.choose);
});

// Conversations

byId("new-conversation").addEventListener("click", () => {
  sidebar.drawer(false);
  chat.startNew();
});
byId("export").addEventListener("click", async () => {
  try {
    const url = URL.createObjectURL(await exportFile(conversations.list()));
    const link = document.createElement("a");
    Object.assign(link, { href: url, download: "webgemma-conversations.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000); // not before the browser has read it
  } catch (error) {
    showNotice(`Nothing was exported: ${error.message}`);
  }
});
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  try {
    const fresh = await importFile(file, conversations.byId);
    await conversations.keepAll(fresh);
    showNotice(fresh.length === 1 ? "One conversation was imported." : `${fresh.length} conversations were imported.`);
    refresh();
  } catch (error) {
    showNotice(error.message);
  }
  target.value = ""; // the same file may be chosen again
});
addEventListener("pagehide", () => chat.keepNow());

for (const close of document.querySelectorAll("[data-close]")) {
  close.addEventListener("click", () => close.closest("dialog").close());
}
fetch("/api/about").then((answer) => answer.json()).then(
  (about) => { byId("version").textContent = `webgemma ${about.version}`; },
  () => {}, // offline: the page works without
);

/** Begin with the model of the last visit; one that may have ended that visit waits to be asked for. */
function begin() {
  const last = lastModel();
  load(last && !last.isSuspect ? last.model : BUNDLED);
  if (!last?.isSuspect) return;
  const again = { name: `Load ${last.model.name}`, act: () => load(last.model) };
  showNotice(`${last.model.name} was not there yet when the last visit ended.`, again);
}

begin();
scroller.toEnd();
composer.focus();
