// The page: connects the conversation and the dialogs with the home, which has the models and their engine.
//
// There are two homes: this tab (tab_home.js) and the server (server_home.js), and whoever serves the page says which
// one it is. Each exports a list of FIELDS, settings of its own as settings.js describes them, and a class Home with
//   engine             writes the replies: see chat.js
//   context            of the model in tokens, or null
//   model              what is known of the model, see welcome.js, or null
//   canReply           whether a message can be sent
//   embedder           makes vectors of documents: see library.js and documents.js
//   explain()          say why not, unless the page shows it already
//   settingsChanged(now, before)
//   start()            choose a model
// whose constructor takes what it needs of the page: `home` below.

import { exportFile, importFile } from "./archive.js";
import { Chat } from "./chat.js";
import { Composer, Tray } from "./composer.js";
import { Conversations } from "./conversations.js";
import { Documents } from "./documents.js";
import { Drafts } from "./drafts.js";
import { byId, saveBlob } from "./dom.js";
import { listenToKeys } from "./keys.js";
import { plural, t } from "./language.js";
import { MessageList, Scroller } from "./messages.js";
import { Microphone } from "./microphone.js";
import { showNotice } from "./notice.js";
import { conceal, reveal, Search } from "./search.js";
import { loadFields, readSettings } from "./settings.js";
import { SettingsDialog } from "./settings_dialog.js";
import { Sidebar } from "./sidebar.js";
import { stopReading } from "./speech.js";
import { ToolBox } from "./tools.js";
import { ToolsMenu } from "./tools_menu.js";
import { saveTranscript } from "./transcript.js";
import { childrenOf, pathOf } from "./tree.js";
import { UndoNotice } from "./undo.js";
import { Welcome } from "./welcome.js";

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
  addDocuments: (files) => documents.add(files), // a promise of them
  changed: () => refresh(), // what can be sent, the model or its context
  endReply(finish) {
    if (finish === "stopped") chat.stop();
    chat.finish({ finish });
  },
  retry: () => checkCanSend() && chat.retry(settingsOf(chat.failed?.conversation)),
});
const settings = new SettingsDialog(readSettings(), {
  changed(now, before) {
    home.settingsChanged(now, before);
    refresh();
  },
  conversation: () => chat.conversation,
  saveOwn: (conversation, values) => chat.setSettings(conversation, values),
});
const settingsOf = (conversation) => ({ ...settings.of(conversation), ...(!home.model?.thinking && { think: false }) });
const settingsHere = () => settingsOf(chat.conversation);
const tools = new ToolBox(about);
const scroller = new Scroller(byId("scroller"), byId("to-end"));
const messages = new MessageList(byId("messages"), {
  regenerate: () => checkCanSend() && chat.regenerate(settingsHere()),
  continueReply: () => checkCanSend() && chat.continueReply(settingsHere()),
  edit: (message, text, attachments) => checkCanSend() && chat.edit(message, text, attachments, settingsHere()),
  showVersion: (message) => chat.showVersion(message),
  isElsewhere: (message) => conversations.elsewhere.has(message),
  isAsking: (call) => tools.isAsking(call),
  give: (call, answer) => tools.give(call, answer),
  stage: () => chat.reply?.stage,
  canvas: () => chat.reply?.canvas,
  citations: (...shown) => documents.citations.show(...shown),
});
const documents = new Documents(home.embedder, {
  conversation: () => chat.conversation,
  path: () => chat.path,
  context: () => home.context,
});
const composer = new Composer({
  send(text) {
    if (!checkCanSend()) return false;
    chat.send(text, tray.take(), settingsHere());
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
  context: () => home.context,
});
const microphone = new Microphone((file) => tray.add([file]), showNotice);
const sidebar = new Sidebar({
  open: (id) => chat.open(id),
  rename: (id, title) => chat.rename(id, title),
  pin: (id) => chat.pin(id),
  remove(id) {
    const conversation = conversations.get(id);
    if (!conversation) return;
    shownWhenDeleted = conversation === chat.conversation ? conversation : null;
    chat.remove(id);
    undo.offer(conversation);
  },
  exports: (id) => [
    { name: t("Export"), act: () => exportOne(conversations.get(id)) },
    { name: t("Save as Markdown"), act: () => saveText(conversations.get(id), "md") },
    { name: t("Save as a web page"), act: () => saveText(conversations.get(id), "html") },
  ],
});
let shownWhenDeleted = null; // the conversation that was deleted last, if it was shown
const undo = new UndoNotice((conversation) => chat.restore(conversation, conversation === shownWhenDeleted));
const search = new Search(conversations, {
  async open({ id }, message, words) {
    sidebar.drawer(false);
    const shown = await chat.openAt(id, message?.id);
    if (!shown) return;
    scroller.isAtEnd = false;
    reveal(messages.items.get(shown).node, words);
  },
  leave() {
    if (!sidebar.isOpen) byId("prompt").focus();
    return !sidebar.isOpen;
  },
});
const welcome = new Welcome({
  suggest(text, needsPicture) {
    const hasDraft = byId("prompt").value.trim() || tray.attachments.length;
    composer.fill(hasDraft ? `${byId("prompt").value}\n${text}`.trim() : text);
    tray.draft.text = byId("prompt").value;
    drafts.save(tray.draft);
    composer.focus();
    if (needsPicture) byId("attach").click();
    else if (!hasDraft) composer.send();
  },
  chooseModel: () => byId("model-button").click(),
});

let frame = 0; // the request of the next animation frame, which shows the grown reply
const chat = new Chat(home.engine, conversations, drafts, tools, {
  model: () => byId("model-name").textContent,
  opened() {
    stopReading();
    byId("announcer").textContent = ""; // so that an equal reply is announced again
    conceal();
    showDraft();
    refresh();
    if (chat.path.length) scroller.toEnd();
    else scroller.toStart();
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
    byId("announcer").textContent = t("The model replied: {text}", { text: message.content });
    refresh();
    scroller.follow();
  },
  notSent: (error) => showNotice(error.message),
  notRead: ({ message }) => showNotice(t("The conversation could not be read ({reason}): reload this page.", { reason: message })),
  passages: (conversation, question) => documents.passagesFor(conversation, question),
  removed(conversation) {
    const keep = { name: t("Keep it"), act: () => chat.restore(conversation, true) };
    showNotice(t("“{title}” was deleted in another tab.", { title: conversation.title }), keep);
  },
});

const toolsMenu = new ToolsMenu(tools, {
  conversation: () => chat.conversation,
  changed: (conversation) => conversations.get(conversation.id) && conversations.save(conversation), // an empty one is not stored
});
tools.addEventListener("asking", () => {
  byId("announcer").textContent = t("The model asks to run a program: answer at the end of the conversation.");
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
  welcome.show(home.model);
  sidebar.show(conversations.list(), conversation.id);
  toolsMenu.show();
  composer.show(chat.reply !== null, canSend());
  settings.follow(Boolean(home.model?.thinking));
  documents.showSwitch();
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
  byId("tokens").textContent = total ? t("{used} of {total} tokens", { used, total }) : "";
  byId("tokens").title = total ? t("The conversation takes {used} tokens of the context, {left} are left. When it is full, the oldest messages are left out.", { used, left: total - used }) : "";
}

// Conversations

function startNew() {
  sidebar.drawer(false);
  chat.startNew();
}

/** Save conversations as a file, after all of them are read. */
async function saveConversations(list, name) {
  try {
    for (const conversation of list) await conversations.complete(conversation);
    saveBlob(await exportFile(list), name);
  } catch ({ message }) {
    showNotice(t("Nothing was exported: {reason}", { reason: message }));
  }
}

/** Save a conversation as a file that Import takes, named after it. */
function exportOne(conversation) {
  const name = conversation.title.replace(/[^\p{L}\p{M}\p{N}_-]+/gu, " ").trim().slice(0, 60).trim();
  saveConversations([conversation], `${name || "webgemma"}.json`);
}

/** Save the messages of a conversation to read elsewhere: "md" or "html". */
async function saveText(conversation, format) {
  try {
    await conversations.complete(conversation);
    await saveTranscript(conversation, pathOf(conversation), format);
  } catch ({ message }) {
    showNotice(t("Nothing was exported: {reason}", { reason: message }));
  }
}

byId("new-conversation").addEventListener("click", startNew);
listenToKeys({
  search() {
    if (!sidebar.isVisible) sidebar.reveal();
    byId("search").select();
  },
  startNew,
  editLast: () => !chat.reply && messages.editLast(),
});
byId("export").addEventListener("click", () => saveConversations(conversations.list(), "webgemma-conversations.json"));
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  try {
    await conversations.completeAll();
    const imported = await importFile(file, conversations.byId, conversations.trash);
    await conversations.add(imported).catch(({ message }) => {
      throw new Error(t("Nothing was imported: the conversations could not be stored ({reason}).", { reason: message }));
    });
    showNotice(plural(imported.length, "One conversation was imported.", "{count} conversations were imported."));
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
  if (name === "QuotaExceededError") return t("The storage of this browser is full: the latest messages are not saved. Free disk space, or delete conversations or stored models; they are saved as soon as there is room.");
  if (name === "InvalidStateError") return t("The latest messages are not saved, because a newer version of this page was opened in another tab. Export your conversations and reload this page.");
  return t("The latest messages are not saved ({reason}). This page tries again; until then, do not close it, or export your conversations.", { reason: message });
}

conversations.addEventListener("unsaved", ({ detail }) => {
  byId("unsaved").textContent = t("Not saved");
  showNotice(unsavedMessage(detail), { name: t("Try again"), act: () => conversations.write() });
});
conversations.addEventListener("saved", () => {
  byId("unsaved").textContent = "";
  showNotice(t("Everything is saved again."));
});

for (const close of document.querySelectorAll("[data-close]")) {
  close.addEventListener("click", () => close.closest("dialog").close());
}

await chat.start();
home.start();
if (storageProblem) {
  showNotice(storageProblem);
  byId("unsaved").textContent = t("Conversations are not stored");
}
undo.offer(...conversations.trash.values()); // what was deleted just before a reload
conversations.readInBackground();
