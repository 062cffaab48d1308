// The page: connects the conversation and the dialogs with the home, which has the models and their engine.
//
// There are two homes: this tab (tab_home.js) and the server (server_home.js), and whoever serves the page says which
// one it is. Each exports a list of FIELDS, settings of its own as settings.js describes them, and a class Home with
//   engine             writes the replies: see chat.js
//   context            of the model in tokens, or null
//   canReply           whether a message can be sent
//   explain()          say why not, unless the page shows it already
//   settingsChanged(now, before)
//   start()            choose a model
// whose constructor takes what it needs of the page: `home` below.

import { exportFile, importFile } from "./archive.js";
import { Chat } from "./chat.js";
import { Composer, Tray } from "./composer.js";
import { Conversations } from "./conversations.js";
import { Drafts } from "./drafts.js";
import { byId, saveBlob } from "./dom.js";
import { t } from "./language.js";
import { MessageList, Scroller } from "./messages.js";
import { Microphone } from "./microphone.js";
import { showNotice } from "./notice.js";
import { loadFields, readSettings, SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { saveTranscript } from "./transcript.js";
import { childrenOf, pathOf } from "./tree.js";

if (location.search) history.replaceState(null, "", location.pathname); // a token stays if the page starts without its server

const HOMES = { tab: () => import("./tab_home.js"), server: () => import("./server_home.js") };
const about = fetch("api/about").then((response) => response.json());
about.then(
  ({ version }) => { byId("version").textContent = `webgemma ${version}`; },
  () => {}, // offline: the version is not shown
);

const { FIELDS, Home } = await HOMES[document.documentElement.dataset.home]();
const conversations = new Conversations();
const drafts = new Drafts();
const [storageProblem] = await Promise.all([conversations.open(), loadFields(FIELDS)]);
await drafts.open(conversations);

const home = new Home({
  about, // a promise
  settings: () => settings.settings,
  attach: (files) => tray.add(files),
  changed: () => refresh(), // what can be sent, the model or its context
  endReply(finish) {
    if (finish === "stopped") chat.stop();
    chat.finish({ finish });
  },
  retry: () => checkCanSend() && chat.retry(settings.settings),
});
const settings = new SettingsDialog(readSettings(), (now, before) => home.settingsChanged(now, before));
const scroller = new Scroller(byId("scroller"), byId("to-end"));
const messages = new MessageList(byId("messages"), {
  regenerate: () => checkCanSend() && chat.regenerate(settings.settings),
  continueReply: () => checkCanSend() && chat.continueReply(settings.settings),
  edit: (message, text, attachments) => checkCanSend() && chat.edit(message, text, attachments, settings.settings),
  showVersion: (message) => chat.showVersion(message),
  isElsewhere: (message) => conversations.elsewhere.has(message),
  stage: () => chat.reply?.stage,
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
const sidebar = new Sidebar({
  open: (id) => chat.open(id),
  rename: (id, title) => chat.rename(id, title),
  remove: (id) => chat.remove(id),
});

let frame = 0; // the request of the next animation frame, which shows the grown reply
const chat = new Chat(home.engine, conversations, drafts, {
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
  return home.canReply && chat.reply === null && !tray.decoding;
}

/** Return whether a message can be sent; if not, show the reason unless the page shows it already. */
function checkCanSend() {
  if (!home.canReply) home.explain();
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
  const total = home.context ?? usage?.context;
  const used = usage ? Math.min(usage.prompt + usage.reply, total) : 0;
  byId("tokens").textContent = total ? `${used} of ${total} tokens` : "";
  byId("tokens").title = total ? `The conversation takes ${used} tokens of the context, ${total - used} are left. When it is full, the oldest messages are left out.` : "";
}

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
for (const [id, format] of [["save-markdown", "md"], ["save-html", "html"]]) {
  byId(id).addEventListener("click", async () => {
    try {
      await saveTranscript(chat.conversation, chat.path, format);
    } catch (error) {
      showNotice(t("Nothing was exported: {reason}", { reason: error.message }));
    }
  });
}
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

home.start();
if (storageProblem) {
  showNotice(storageProblem);
  byId("unsaved").textContent = "Conversations are not stored";
}
showDraft();
scroller.toEnd();
composer.focus();
