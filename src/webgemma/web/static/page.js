// The page: connects the engine, the conversation and the dialogs.

import { exportFile, importFile } from "./archive.js";
import { Chat } from "./chat.js";
import { Composer, Tray } from "./composer.js";
import { Conversations } from "./conversations.js";
import { Drafts } from "./drafts.js";
import { byId, humanSize, saveBlob } from "./dom.js";
import { Engine } from "./engine.js";
import { handleDrops } from "./files.js";
import { keptHandles } from "./handles.js";
import { MessageList, Scroller } from "./messages.js";
import { Microphone } from "./microphone.js";
import { BUNDLED, lastModel, ModelDialog, rememberModel } from "./models.js";
import { errorMessage, hideNotice, noticeText, showNotice } from "./notice.js";
import { endLoading, showLoading, startLoading } from "./progress.js";
import { loadFields, loadOptions, readSettings, SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { childrenOf, pathOf } from "./tree.js";
import { TuneDialog } from "./tune.js";

if (location.search) history.replaceState(null, "", "/"); // a token stays if the page starts without its server

const conversations = new Conversations();
const drafts = new Drafts();
const [storageProblem] = await Promise.all([conversations.open(), loadFields()]);
await drafts.open(conversations);

const engine = new Engine();
const settings = new SettingsDialog(readSettings(), (now, before) => {
  if (now.context === before.context || engine.state === "empty") return;
  showNotice("The new context applies when the model is loaded again.", actions.reload);
});
const models = new ModelDialog(engine, choose);
const scroller = new Scroller(byId("scroller"), byId("to-end"));
const messages = new MessageList(byId("messages"), {
  regenerate: () => checkCanSend() && chat.regenerate(settings.settings),
  continueReply: () => checkCanSend() && chat.continueReply(settings.settings),
  edit: (message, text, attachments) => checkCanSend() && chat.edit(message, text, attachments, settings.settings),
  showVersion: (message) => chat.showVersion(message),
  isElsewhere: (message) => conversations.elsewhere.has(message),
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
  typed(text) {
    tray.draft.text = text;
    drafts.save(tray.draft);
  },
}, () => tray.attachments.length > 0);
const tray = new Tray({
  changed: (draft) => drafts.save(draft),
  shown: () => composer.show(chat.reply !== null, canSend()),
  notify: showNotice,
});
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
const chat = new Chat(engine, conversations, drafts, {
  model: () => byId("model-name").textContent,
  opened() {
    byId("announcer").textContent = ""; // so that an equal reply is announced again
    showDraft();
    refresh();
    scroller.toEnd();
    composer.focus();
  },
  changed() {
    refresh();
    scroller.follow();
  },
  grown(message) {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      messages.update(message, chat.reply?.message === message);
      showTokens();
      scroller.follow();
    });
  },
  finished(message) {
    byId("announcer").textContent = `The model replied: ${message.content}`;
    refresh();
    scroller.follow();
  },
  notSent: (error) => showNotice(error.message),
  notRemoved: (error) => showNotice(`The conversation could not be deleted (${error.message}).`),
  removed(conversation) {
    const keep = { name: "Keep it", act: () => chat.restore(conversation) };
    showNotice(`“${conversation.title}” was deleted in another tab.`, keep);
  },
});

function canSend() {
  return engine.state === "loaded" && !isInspecting && !engine.isTuning && chat.reply === null && !tray.decoding;
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
  const children = childrenOf(conversation);
  const path = pathOf(conversation, children);
  const leftOut = usageOf(path)?.left_out ?? 0;
  messages.show(path, { replying: chat.replying, children, leftOut: leftOut < path.length ? leftOut : 0 });
  showTokens();
  byId("welcome").hidden = path.length > 0;
  sidebar.show(conversations.list(), conversation.id);
  composer.show(chat.reply !== null, canSend());
  document.title = path.length ? `${conversation.title} – webgemma` : "webgemma";
}

/** Show the draft of the conversation that is shown. */
function showDraft() {
  const draft = drafts.of(chat.conversation.id);
  if (tray.draft === draft) return;
  tray.open(draft);
  composer.fill(draft.text);
}

/** Return the tokens of the last reply that has some. */
const usageOf = (path) => path.findLast(({ usage }) => usage)?.usage;

/** Show how much of the context the conversation takes. */
function showTokens() {
  const usage = usageOf(chat.path);
  const total = context ?? usage?.context;
  const used = usage ? Math.min(usage.prompt + usage.reply, total) : 0;
  byId("tokens").textContent = total ? `${used} of ${total} tokens` : "";
  byId("tokens").title = total ? `The conversation takes ${used} tokens of the context, ${total - used} are left. When it is full, the oldest messages are left out.` : "";
}

// Models

let context = null; // of the loaded model, in tokens
let selected = BUNDLED; // the model that was chosen last
let isSubstitute = false; // it is loaded because the model of the last visit cannot be
let requestedContext = null; // of the settings, when the model was loaded
let latestChoice = 0; // the number of the latest choice: earlier ones are dropped
let isInspecting = false;
let deviceName = ""; // of the GPU
const actions = {
  reload: { name: "Load the model again", act: () => { engine.restart(); if (isSubstitute) startLoad(); else load(selected); } },
  choose: { name: "Choose a model", act: () => models.open() },
  tune: { name: "Show fine-tuning", act: () => tune.open() },
  adapters: { name: "Show the adapters", act: () => tune.open() },
};

const isChromium = Boolean(navigator.userAgentData?.brands.some(({ brand }) => brand === "Chromium"));
const DEVICE_TITLE = byId("device").title;
const MATRICES_OFF = ". Its matrix units (tensor cores), if it has any, are off: with chrome://flags/#enable-unsafe-webgpu "
  + "enabled, this page reads prompts faster.";

/** Load a model that the user has chosen if its file is one, and return whether it is; else the loaded one stays. */
async function choose(model) {
  latestChoice += 1;
  const number = latestChoice;
  setInspecting(true);
  if (engine.state !== "loading") startLoading(model.name);
  const { source } = model;
  let inspected = null;
  let problem = null;
  try {
    inspected = await engine.inspect(source);
  } catch (detail) {
    problem = detail;
  }
  if (number !== latestChoice) return inspected?.kind === "model";
  setInspecting(false);
  if (inspected?.kind === "model") {
    load(model, inspected.id);
    return true;
  }
  if (engine.state !== "loading") endLoading();
  if (problem) {
    const stays = engine.state === "loaded" ? `${selected.name} stays loaded.` : "";
    showNotice(`${errorMessage(problem)} ${stays}`.trim(), actions.choose);
  } else if (inspected?.kind === "adapter") {
    engine.addAdapter(source);
  } else if (inspected) {
    models.addMmproj(source.file);
  }
  return false;
}

/** Note that a file is being inspected: a message sent now would lose its reply to the model that is loaded next. */
function setInspecting(value) {
  isInspecting = value;
  composer.show(chat.reply !== null, canSend());
}

function load(model, inspected = null) {
  selected = model;
  isSubstitute = false;
  rememberModel(model, false);
  startLoad(inspected);
}

/** Load the selected model. */
function startLoad(inspected = null) {
  context = null;
  chat.stop();
  chat.finish({ finish: "stopped" });
  hideNotice();
  showModel("no model", "");
  startLoading(selected.name);
  const options = loadOptions(settings.settings);
  requestedContext = options.context;
  engine.load(selected.source, options, inspected);
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
  const mayBeOff = !detail.software && !detail.matrix_units && isChromium;
  byId("device").title = DEVICE_TITLE + (mayBeOff ? MATRICES_OFF : "");
});
engine.addEventListener("progress", ({ detail }) => showLoading(detail));
engine.addEventListener("loaded", ({ detail }) => {
  endLoading();
  if (!isSubstitute) rememberModel(selected, true);
  ({ context } = detail);
  if (requestedContext > detail.context && byId("notice").hidden) {
    showNotice(`${selected.name} has a context of at most ${detail.context} tokens: it is loaded with that, not with the ${requestedContext} of the settings.`);
  }
  const hint = `${detail.name}: context of ${detail.context} tokens, ${humanSize(detail.nbytes)} of memory`;
  showModel(selected.name, `${deviceName || detail.device} · ${humanSize(detail.nbytes)}`, hint);
  refresh();
});
engine.addEventListener("loaded", storePage, { once: true });
engine.addEventListener("adapter_added", ({ detail }) => {
  showNotice(`${detail.name} is an adapter, not a model: it is in the list of adapters now, where it can be applied.`, actions.adapters);
});
engine.addEventListener("stored", ({ detail }) => {
  const { source } = selected;
  if (source.kind !== "file" || models.stored.copyOf(source)?.id !== detail.id) return;
  rememberModel({ name: selected.name, source: { kind: "stored", id: detail.id, name: selected.name } }, true);
});
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
  latestChoice += 1; // an inspection is cancelled
  const wasInspecting = isInspecting;
  setInspecting(false);
  if (wasInspecting && engine.state !== "loading") {
    endLoading();
    return;
  }
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
    await conversations.add(imported).catch(({ message }) => {
      throw new Error(`Nothing was imported: the conversations could not be stored (${message}).`);
    });
    showNotice(imported.length === 1 ? "One conversation was imported." : `${imported.length} conversations were imported.`);
    refresh();
  } catch (error) {
    showNotice(error.message);
  }
  target.value = ""; // the same file may be chosen again
});
addEventListener("pagehide", ({ persisted }) => chat.saveNow(!persisted));
addEventListener("pageshow", ({ persisted }) => persisted && conversations.catchUp());
document.addEventListener("resume", () => conversations.catchUp()); // the browser had frozen this tab
addEventListener("beforeunload", (event) => {
  if (conversations.isUnsaved) event.preventDefault();
});

/** What is wrong when conversations cannot be written, and what helps. */
function unsavedMessage({ name, message }) {
  if (name === "QuotaExceededError") return "The storage of this browser is full: the latest messages are not saved. Free disk space, or delete conversations or stored models; they are saved as soon as there is room.";
  if (name === "InvalidStateError") return "The latest messages are not saved, because a newer version of this page was opened in another tab. Export your conversations and reload this page.";
  return `The latest messages are not saved (${message}). This page tries again; until then, do not close it, or export your conversations.`;
}

conversations.addEventListener("unsaved", ({ detail }) => {
  byId("unsaved").textContent = "Not saved";
  showNotice(unsavedMessage(detail), { name: "Try again", act: () => conversations.write() });
});
conversations.addEventListener("saved", () => {
  byId("unsaved").textContent = "";
  showNotice("Everything is saved again.");
});

for (const close of document.querySelectorAll("[data-close]")) {
  close.addEventListener("click", () => close.closest("dialog").close());
}
fetch("/api/about").then((response) => response.json()).then(
  (about) => { byId("version").textContent = `webgemma ${about.version}`; },
  () => {}, // offline: the version is not shown
);

/** Load the model of the last visit, or, if that is not possible at once, the bundled one, and offer the other. */
async function start() {
  const last = lastModel();
  const { name, source } = last?.model ?? BUNDLED;
  const handles = source.kind === "file" ? await keptHandles(name) : null;
  if (source.kind !== "file" && !last?.wasLoading) load(last?.model ?? BUNDLED);
  else if (handles?.isAllowed && !last.wasLoading) openAgain(handles);
  else loadInstead(last, handles);
}

/** Load the bundled model, and say why it is not the model of the last visit: that one may have crashed the page. */
function loadInstead({ model, wasLoading }, handles) {
  isSubstitute = true;
  startLoad();
  const { name, source } = model;
  const why = wasLoading ? `${name} was still loading when the last visit ended.` : `${name} was the model of the last visit.`;
  const now = "The bundled model is loaded instead.";
  if (source.kind !== "file") showNotice(`${why} ${now}`, { name: `Load ${name}`, act: () => choose(model) });
  else if (handles) showNotice(`${why} ${now} The browser asks before this page may read the file again.`, { name: `Load ${name}`, act: () => openAgain(handles) });
  else {
    showNotice(
      `${why} ${now} Choose or drop the file again, and store it in this browser to have it at every visit.`,
      { name: `Choose ${name} …`, act: () => models.files.choose() },
    );
  }
}

/** Load the file of the last visit; if that fails, say why, and load the bundled model if there is none. */
async function openAgain(handles) {
  try {
    if (await models.files.use(...await handles.open()) || engine.state !== "empty") return;
  } catch (error) {
    showNotice(`${lastModel().model.name} cannot be read again (${error.message}): choose it again.`);
  }
  const message = noticeText();
  if (engine.state === "empty") {
    isSubstitute = true;
    startLoad();
  }
  showNotice(message, actions.choose);
}

start();
if (storageProblem) {
  showNotice(storageProblem);
  byId("unsaved").textContent = "Conversations are not stored";
}
showDraft();
scroller.toEnd();
composer.focus();
