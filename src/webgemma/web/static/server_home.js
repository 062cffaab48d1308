// The page's home on the server that it comes from: one of its models, which the server loads when it is needed.

import { byId } from "./dom.js";
import { handleDrops } from "./files.js";
import { t } from "./language.js";
import { hideNotice, noticeText, showNotice } from "./notice.js";
import { problemOf, request } from "./server_access.js";
import { ServerEmbedder } from "./server_embedder.js";
import { ServerEngine } from "./server_engine.js";
import { ServedModels } from "./served_models.js";

export const FIELDS = []; // the server chooses the context

const LAST_MODEL = "webgemma.server-model"; // in localStorage: a name
const DEVICE_TITLE = t("Whether the server has the model in memory; if not, it loads it for the first reply.");
const NOT_HERE = t("Here the server writes the replies: it loads models, and trains none. `webgemma web` has a page that does both in a tab.");

async function readJson(path, mayAsk) {
  const response = await request(path, {}, mayAsk);
  if (!response.ok) throw new Error(await problemOf(response));
  return response.json();
}

/** Read the server's models: [{name, nbytes, details, state, context}]; those in memory were used in their order. */
async function readModels(mayAsk) {
  const paths = ["../api/tags", "../status.json"];
  const [{ models }, status] = await Promise.all(paths.map((path) => readJson(path, mayAsk)));
  const listed = models.map(({ name, size, details }) => {
    const loaded = status.models.find((model) => model.name === name);
    const state = loaded ? t("in memory") : status.loading.includes(name) ? t("is being loaded") : "";
    return { name, nbytes: size, details, state, context: loaded?.context ?? null };
  });
  return { listed, used: status.models.map(({ name }) => name) };
}

function lastModel() {
  try {
    return localStorage.getItem(LAST_MODEL);
  } catch {
    return null; // storage is forbidden
  }
}

function rememberModel(name) {
  try {
    localStorage.setItem(LAST_MODEL, name);
  } catch { /* the next visit starts with another model */ }
}

/** The server's models, of which one is chosen. */
export class Home {
  constructor(page) {
    this.page = page;
    this.models = [];
    this.problem = ""; // why they could not be read
    this.failure = ""; // of the latest reply
    this.bundled = null; // not known yet
    this.isWaiting = false; // for the model or other replies
    this.engine = new ServerEngine();
    this.embedder = new ServerEmbedder();
    this.dialog = new ServedModels({ choose: (name) => this.choose(name), refresh: () => this.refresh() });
    page.about.then((about) => this.learn(about), () => {});
    const refuse = () => showNotice(NOT_HERE);
    handleDrops({ models: refuse, examples: refuse, others: page.attach, documents: page.addDocuments });
    this.engine.addEventListener("waiting", () => this.follow(true));
    this.engine.addEventListener("piece", () => this.isWaiting && this.follow(false));
    this.engine.addEventListener("done", () => this.onDone());
    this.engine.addEventListener("error", ({ detail }) => this.onError(detail));
    byId("device").title = DEVICE_TITLE;
  }

  learn({ max_body_nbytes: most, bundled }) {
    this.engine.maxNbytes = most; // the server refuses more itself
    this.bundled = bundled; // {name, nbytes} of the model that webgemma comes with
    this.page.changed();
  }

  get canReply() {
    return this.engine.model !== null;
  }

  get model() {
    const { model: name } = this.engine;
    if (name === null) return null;
    const { nbytes, details } = this.models.find((each) => each.name === name) ?? {};
    const isBundled = name === this.bundled?.name && nbytes === this.bundled.nbytes;
    return { name, isBundled, isOnly: this.models.length === 1, isReady: true, context: this.context, thinking: details?.family !== "gemma3" };
  }

  get context() {
    return this.models.find(({ name }) => name === this.engine.model)?.context ?? null;
  }

  explain() {
    const message = this.problem || t("No model is chosen: the list of the server’s models is being read.");
    if (byId("notice").hidden) showNotice(message, this.problem ? { name: t("Try again"), act: () => this.start() } : null);
  }

  settingsChanged() {} // they are sent with every message

  /** Choose the model of the last visit, or the one that the server has used last, or its first. */
  async start() {
    await this.refresh();
    if (this.problem) this.explain();
  }

  /** Read the list of models again; the person may be asked for a key. */
  async refresh(mayAsk = true) {
    try {
      const { listed, used } = await readModels(mayAsk);
      this.models = listed;
      this.embedder.models = listed;
      this.problem = "";
      const names = listed.map(({ name }) => name);
      this.engine.model ??= [lastModel(), ...used, names[0]].find((name) => names.includes(name)) ?? null;
    } catch (error) {
      this.problem = error.message;
    }
    this.show();
  }

  choose(name) {
    this.engine.model = name;
    rememberModel(name);
    this.show();
  }

  show() {
    const { model } = this.engine;
    byId("model-name").textContent = model ?? t("no model");
    byId("device").textContent = this.models.find(({ name }) => name === model)?.state ?? "";
    this.dialog.show(this.models, model, this.problem);
    this.page.changed();
  }

  /** Show which model is in memory now: a reply waits, or does so no longer. */
  follow(isWaiting) {
    this.isWaiting = isWaiting;
    this.refresh(false);
  }

  onDone() {
    if (noticeText() === this.failure) hideNotice(); // the server replies again
    this.follow(false);
  }

  onError({ message }) {
    this.failure = message;
    this.page.endReply("error");
    showNotice(message, { name: t("Try again"), act: this.page.retry });
    this.follow(false);
  }
}
