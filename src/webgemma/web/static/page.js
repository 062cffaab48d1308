// The page: connects the engine, the conversation and the dialogs.

import { exportFile, importFile } from "./archive.js";
import { Chat } from "./chat.js";
import { Composer, Tray } from "./composer.js";
import { Conversations } from "./conversations.js";
import { byId, humanSize, saveBlob } from "./dom.js";
import { Engine } from "./engine.js";
import { handleDrops } from "./files.js";
import { MessageList, Scroller } from "./messages.js";
import { Microphone } from "./microphone.js";
import { BUNDLED, lastModel, ModelDialog, rememberModel } from "./models.js";
import { errorMessage, hideNotice, noticeText, showNotice } from "./notice.js";
import { endLoading, showLoading, startLoading } from "./progress.js";
import { loadFields, loadOptions, readSettings, SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { TuneDialog } from "./tune.js";

const conversations = new Conversations();
const [storageProblem] = await Promise.all([conversations.open(), loadFields()]);
if (storageProblem) showNotice(storageProblem);

const engine = new Engine();
const settings = new SettingsDialog(readSettings(), (now, before) => {
  if (now.context === before.context || engine.state === "empty") return;
  showNotice("The new context applies when the model is loaded again.", actions.reload);
});
const models = new ModelDialog(engine, load);
const scroller = new Scroller(byId("scroller"), byId("to-end"));
const messages = new MessageList(byId("messages"), {
  regenerate: () => checkCanSend() && chat.regenerate(settings.settings),
  edit: (message, text, attachments) => checkCanSend() && chat.edit(message, text, attachments, settings.settings),
  encoding: () => chat.reply?.encoding,
  canvas: () => chat.reply?.canvas,
});
const composer = new Composer({
  send(text) {
    if (!checkCanSend()) return false;
    chat.send(text, tray.take(), settings.settings);
    return true;
  },
  stop: () => microphone.end(false) || chat.stop(),
}, () => tray.attachments.length > 0);
const tray = new Tray(() => composer.show(chat.reply !== null, canSend()), showNotice);
const microphone = new Microphone((file) => tray.add([file]), showNotice);
const tune = new TuneDialog(engine, () => refresh(), showNotice);
handleDrops({
  models: (files) => models.files.add(files),
  examples: ([file]) => tune.read(file),
  others: (files) => tray.add(files),
});
const sidebar = new Sidebar({
  open: (id) => chat.open(id),
  rename: (id, title) => chat.rename(id, title),
  remove: (id) => chat.remove(id),
});

let frame = 0; // the request of the next animation frame, which shows the grown reply
const chat = new Chat(engine, conversations, {
  changed() {
    byId("announcer").textContent = ""; // so that an equal reply is announced again
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
    byId("announcer").textContent = `The model replied: ${message.content}`;
    refresh();
    scroller.follow();
  },
  notSent: (error) => showNotice(error.message),
  notSaved: (error) => showNotice(`This conversation could not be saved (${error.message}): export it.`),
});

function canSend() {
  return engine.state === "loaded" && !engine.isTuning && chat.reply === null && !tray.decoding;
}

/** Return whether a message can be sent; if not, show the reason unless the page shows it already. */
function checkCanSend() {
  if (engine.state === "empty" && byId("notice").hidden) showNotice("No model is loaded.", actions.reload);
  if (engine.isTuning) showNotice("The model is being fine-tuned: it can reply again afterwards.", actions.tune);
  return canSend();
}

/** Show the current state. */
function refresh() {
  const { conversation } = chat;
  messages.show(conversation.messages, chat.replying);
  byId("welcome").hidden = conversation.messages.length > 0;
  sidebar.show(conversations.list(), conversation.id);
  composer.show(chat.reply !== null, canSend());
  document.title = conversation.messages.length ? `${conversation.title} – webgemma` : "webgemma";
}

// Models

let selected = BUNDLED; // the model that was chosen last
let deviceName = ""; // of the GPU
const actions = {
  reload: { name: "Load the model again", act: () => { engine.restart(); load(selected); } },
  choose: { name: "Choose a model", act: () => models.open() },
  tune: { name: "Show fine-tuning", act: () => tune.open() },
};

function load(model) {
  selected = model;
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
  models.current = engine.state === "loaded" ? selected : null;
  byId("model-name").textContent = name;
  byId("model-button").title = hint;
  byId("device").textContent = device;
}

engine.addEventListener("ready", ({ detail }) => {
  deviceName = detail.device + (detail.software ? " (software, slow)" : "");
});
engine.addEventListener("progress", ({ detail }) => showLoading(detail));
engine.addEventListener("loaded", ({ detail }) => {
  endLoading();
  rememberModel(selected, true);
  const hint = `${detail.name}: context of ${detail.context} tokens, ${humanSize(detail.nbytes)} of memory`;
  showModel(selected.name, `${deviceName || detail.device} · ${humanSize(detail.nbytes)}`, hint);
  refresh();
});
engine.addEventListener("loaded", storePage, { once: true });
engine.addEventListener("adapter_applied", ({ detail }) => {
  if (engine.state === "loaded") byId("model-name").textContent = selected.name + (detail.name ? ` + ${detail.name}` : "");
});
engine.addEventListener("error", ({ detail }) => {
  if (detail.store !== undefined) return; // stored.js shows it
  if (detail.tune !== undefined && engine.state !== "empty") return; // tune.js shows it
  if (engine.state === "empty") {
    endLoading();
    showModel("no model", "");
    showNotice(errorMessage(detail), ["file", "storage", "memory"].includes(detail.kind) ? actions.choose : actions.reload);
    if (detail.kind === "memory") suggestModels(errorMessage(detail));
  } else {
    showNotice(errorMessage(detail));
  }
  chat.finish({ finish: "error" });
  refresh();
});

/** Add the models that fit the GPU to a notice, once they are known. */
async function suggestModels(message) {
  const names = (await models.fittingNames()).filter((name) => name !== selected.name);
  if (noticeText() === message) showNotice(`${message} These would fit: ${names.join(", ")}.`, actions.choose);
}

/** Store the page for visits without its server; only after a model is loaded, so as not to slow the first visit. */
async function storePage() {
  if (!navigator.serviceWorker) return;
  try {
    await navigator.serviceWorker.register("/sw.js");
    const { active } = await navigator.serviceWorker.ready;
    active.postMessage("refresh");
  } catch { /* forbidden, or the storage is full: the page works while its server runs */ }
}

byId("loading-cancel").addEventListener("click", () => {
  engine.restart();
  endLoading();
  showNotice(`Loading ${selected.name} was cancelled.`, actions.choose);
});

// Conversations

byId("new-conversation").addEventListener("click", () => {
  sidebar.drawer(false);
  chat.startNew();
});
byId("export").addEventListener("click", async () => {
  try {
    saveBlob(await exportFile(conversations.list()), "webgemma-conversations.json");
  } catch (error) {
    showNotice(`Nothing was exported: ${error.message}`);
  }
});
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  try {
    const imported = await importFile(file, conversations.byId);
    await conversations.saveAll(imported);
    showNotice(imported.length === 1 ? "One conversation was imported." : `${imported.length} conversations were imported.`);
    refresh();
  } catch (error) {
    showNotice(error.message);
  }
  target.value = ""; // the same file may be chosen again
});
addEventListener("pagehide", () => chat.saveNow());

for (const close of document.querySelectorAll("[data-close]")) {
  close.addEventListener("click", () => close.closest("dialog").close());
}
fetch("/api/about").then((response) => response.json()).then(
  (about) => { byId("version").textContent = `webgemma ${about.version}`; },
  () => {}, // offline: the version is not shown
);

/** Load the model of the last visit; one that was still loading then may have crashed the page, so it is offered. */
function start() {
  const last = lastModel();
  load(last && !last.wasLoading ? last.model : BUNDLED);
  if (!last?.wasLoading) return;
  const loadLast = { name: `Load ${last.model.name}`, act: () => load(last.model) };
  showNotice(`${last.model.name} was still loading when the last visit ended.`, loadLast);
}

start();
scroller.toEnd();
composer.focus();
