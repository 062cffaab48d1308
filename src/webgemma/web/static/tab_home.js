// The page's home in this tab: models that are loaded here, from the browser's storage, Ollama's store or files, and
// fine-tuned.

import { byId, humanSize } from "./dom.js";
import { handleDrops } from "./files.js";
import { keptHandles } from "./handles.js";
import { t } from "./language.js";
import { BUNDLED, lastModel, ModelDialog, rememberModel } from "./models.js";
import { errorMessage, hideNotice, noticeText, showNotice } from "./notice.js";
import { endLoading, showLoading, startLoading } from "./progress.js";
import { isHosted } from "./scope.js";
import { TabEmbedder } from "./tab_embedder.js";
import { TabEngine } from "./tab_engine.js";
import { TuneDialog } from "./tune.js";

export const FIELDS = [
  { name: "context", label: t("Context"), min: 16, max: 1048576, integer: true, help: t("Tokens of prompt and reply together.") },
];

const isChromium = Boolean(navigator.userAgentData?.brands.some(({ brand }) => brand === "Chromium"));
const DEVICE_TITLE = byId("device").title;
const MATRICES_OFF = t("The GPU, and the memory that the model takes. Its matrix units (tensor cores), if it has any, are off: with {flag} enabled, this page reads prompts faster.", {
  flag: "chrome://flags/#enable-unsafe-webgpu",
});

/** The loaded model, and how it is chosen. */
export class Home {
  constructor(page) {
    this.page = page;
    this.context = null; // of the loaded model, in tokens
    this.abilities = {}; // of the loaded model
    this.selected = BUNDLED; // the model that was chosen last
    this.isSubstitute = false; // it is loaded because the model of the last visit cannot be
    this.requestedContext = null; // of the settings, when the model was loaded
    this.latestChoice = 0; // the number of the latest choice: earlier ones are dropped
    this.isInspecting = false;
    this.deviceName = ""; // of the GPU
    this.engine = new TabEngine();
    this.models = new ModelDialog(this.engine, (model) => this.choose(model));
    this.embedder = new TabEmbedder(this.engine, this.models);
    this.tune = new TuneDialog(this.engine, page.changed, showNotice);
    this.actions = {
      reload: { name: t("Load the model again"), act: () => this.reload() },
      choose: { name: t("Choose a model"), act: () => this.models.open() },
      tune: { name: t("Show fine-tuning"), act: () => this.tune.open() },
      adapters: { name: t("Show the adapters"), act: () => this.tune.open() },
    };
    handleDrops({
      models: (files) => this.models.files.add(files),
      examples: ([file]) => this.tune.read(file),
      others: page.attach,
      documents: page.addDocuments,
    });
    this.addListeners();
  }

  addListeners() {
    const { engine } = this;
    engine.addEventListener("ready", ({ detail }) => this.onReady(detail));
    engine.addEventListener("progress", ({ detail }) => showLoading(detail));
    engine.addEventListener("loaded", ({ detail }) => this.onLoaded(detail));
    engine.addEventListener("loaded", storePage, { once: true });
    engine.addEventListener("adapter_added", ({ detail }) => {
      showNotice(t("{name} is an adapter, not a model: it is in the list of adapters now, where it can be applied.", { name: detail.name }), this.actions.adapters);
    });
    engine.addEventListener("stored", ({ detail }) => this.onStored(detail));
    engine.addEventListener("adapter_applied", ({ detail }) => {
      if (engine.state === "loaded") byId("model-name").textContent = this.selected.name + (detail.name ? ` + ${detail.name}` : "");
    });
    engine.addEventListener("error", ({ detail }) => this.onError(detail));
    byId("loading-cancel").addEventListener("click", () => this.cancelLoading());
  }

  get model() {
    const { name, source } = this.selected;
    return { name, isBundled: source.kind === "bundled", isReady: this.engine.state === "loaded", context: this.context, ...this.abilities };
  }

  get canReply() {
    return this.engine.state === "loaded" && !this.isInspecting && !this.engine.isTuning;
  }

  explain() {
    if (this.engine.state === "empty" && byId("notice").hidden) showNotice(t("No model is loaded."), this.actions.reload);
    if (this.engine.isTuning) showNotice(t("The model is being fine-tuned: it can reply again afterwards."), this.actions.tune);
  }

  settingsChanged(now, before) {
    if (now.context === before.context || this.engine.state === "empty") return;
    showNotice(t("The new context applies when the model is loaded again."), this.actions.reload);
  }

  /** Load a model that the user has chosen if its file is one, and return whether it is; else the loaded one stays. */
  async choose(model) {
    const { engine } = this;
    this.latestChoice += 1;
    const number = this.latestChoice;
    this.setInspecting(true);
    if (engine.state !== "loading") startLoading(model.name);
    const { source } = model;
    let inspected = null;
    let problem = null;
    try {
      inspected = await engine.inspect(source);
    } catch (detail) {
      problem = detail;
    }
    if (number !== this.latestChoice) return inspected?.kind === "model";
    this.setInspecting(false);
    if (inspected?.kind === "model") {
      this.load(model, inspected.id);
      return true;
    }
    if (engine.state !== "loading") endLoading();
    if (problem) {
      const stays = engine.state === "loaded" ? t("{name} stays loaded.", { name: this.selected.name }) : "";
      showNotice(`${errorMessage(problem)} ${stays}`.trim(), this.actions.choose);
    } else if (inspected?.kind === "adapter") {
      engine.addAdapter(source);
    } else if (inspected) {
      this.models.addMmproj(source.file);
    }
    return false;
  }

  /** Note that a file is being inspected: a message sent now would lose its reply to the model that is loaded next. */
  setInspecting(value) {
    this.isInspecting = value;
    this.page.changed();
  }

  load(model, inspected = null) {
    this.selected = model;
    this.isSubstitute = false;
    rememberModel(model, false);
    this.startLoad(inspected);
  }

  /** Load the selected model. */
  startLoad(inspected = null) {
    const { engine, page, selected } = this;
    this.context = null;
    this.abilities = {};
    page.endReply("stopped");
    hideNotice();
    this.showModel(t("no model"), "");
    startLoading(selected.name);
    const { context } = page.settings();
    this.requestedContext = context;
    engine.load(selected.source, { context, precision: "auto" }, inspected);
    page.changed();
  }

  reload() {
    this.engine.restart();
    if (this.isSubstitute) this.startLoad();
    else this.load(this.selected);
  }

  showModel(name, device, hint = "") {
    this.models.current = this.engine.state === "loaded" ? this.selected : null;
    byId("model-name").textContent = name;
    byId("model-button").title = hint;
    byId("device").textContent = device;
  }

  onReady({ device, software, matrix_units: hasMatrixUnits }) {
    this.deviceName = software ? t("{device} (software, slow)", { device }) : device;
    const mayBeOff = !software && !hasMatrixUnits && isChromium;
    byId("device").title = mayBeOff ? MATRICES_OFF : DEVICE_TITLE;
  }

  onLoaded({ name, context, device, nbytes, images, audio, thinking }) {
    const { selected, requestedContext } = this;
    endLoading();
    if (!this.isSubstitute) rememberModel(selected, true);
    this.context = context;
    this.abilities = { images, audio, thinking };
    if (requestedContext > context && byId("notice").hidden) {
      showNotice(t("{name} has a context of at most {context} tokens: it is loaded with that, not with the {requested} of the settings.", {
        name: selected.name, context, requested: requestedContext,
      }));
    }
    const hint = t("{name}: context of {context} tokens, {size} of memory", { name, context, size: humanSize(nbytes) });
    this.showModel(selected.name, `${this.deviceName || device} · ${humanSize(nbytes)}`, hint);
    this.page.changed();
  }

  onStored({ id }) {
    const { name, source } = this.selected;
    if (source.kind !== "file" || this.models.stored.copyOf(source)?.id !== id) return;
    rememberModel({ name, source: { kind: "stored", id, name } }, true);
  }

  onError(detail) {
    if (detail.store !== undefined) return; // stored.js shows it
    if (detail.tune !== undefined && this.engine.state !== "empty") return; // tune.js shows it
    if (this.engine.state === "empty") {
      endLoading();
      this.showModel(t("no model"), "");
      const isOfModel = ["file", "storage", "memory"].includes(detail.kind);
      showNotice(errorMessage(detail), isOfModel ? this.actions.choose : this.actions.reload);
      if (detail.kind === "memory") this.suggestModels(errorMessage(detail));
    } else {
      showNotice(errorMessage(detail));
    }
    this.page.endReply("error");
    this.page.changed();
  }

  /** Add the models that fit the GPU to a notice, once they are known. */
  async suggestModels(message) {
    const names = (await this.models.fittingNames()).filter((name) => name !== this.selected.name);
    if (noticeText() === message) showNotice(t("{problem} These would fit: {names}.", { problem: message, names: names.join(", ") }), this.actions.choose);
  }

  cancelLoading() {
    this.latestChoice += 1; // an inspection is cancelled
    const wasInspecting = this.isInspecting;
    this.setInspecting(false);
    if (wasInspecting && this.engine.state !== "loading") {
      endLoading();
      return;
    }
    this.engine.restart();
    endLoading();
    showNotice(t("Loading {name} was cancelled.", { name: this.selected.name }), this.actions.choose);
  }

  /** Load the model of the last visit, or, if that is not possible at once, the bundled one, and offer the other. */
  async start() {
    const last = lastModel();
    const { name, source } = last?.model ?? BUNDLED;
    const handles = source.kind === "file" ? await keptHandles(name) : null;
    if (!last && isHosted) this.offerModel();
    if (source.kind !== "file" && !last?.wasLoading) this.load(last?.model ?? BUNDLED);
    else if (handles?.isAllowed && !last.wasLoading) this.openAgain(handles);
    else this.loadInstead(last, handles);
  }

  /** Offer the model that this page was exported with: it may be large, and the visitor decides. */
  async offerModel() {
    const model = await this.models.offered();
    if (!model || !byId("notice").hidden || this.selected !== BUNDLED) return;
    const { name, size } = model;
    showNotice(t("This page offers {name} ({size}).", { name, size }), { name: t("Load {name}", { name }), act: () => this.choose(model) });
  }

  /** Load the bundled model, and say why it is not the model of the last visit: that one may have crashed the page. */
  loadInstead({ model, wasLoading }, handles) {
    this.isSubstitute = true;
    this.startLoad();
    const { name, source } = model;
    const why = wasLoading
      ? t("{name} was still loading when the last visit ended. The bundled model is loaded instead.", { name })
      : t("{name} was the model of the last visit. The bundled model is loaded instead.", { name });
    const load = t("Load {name}", { name });
    if (source.kind !== "file") showNotice(why, { name: load, act: () => this.choose(model) });
    else if (handles) {
      showNotice(
        `${why} ${t("The browser asks before this page may read the file again.")}`,
        { name: load, act: () => this.openAgain(handles) },
      );
    } else {
      showNotice(
        `${why} ${t("Choose or drop the file again, and store it in this browser to have it at every visit.")}`,
        { name: t("Choose {name} …", { name }), act: () => this.models.files.choose() },
      );
    }
  }

  /** Load the file of the last visit; if that fails, say why, and load the bundled model if there is none. */
  async openAgain(handles) {
    try {
      if (await this.models.files.use(...await handles.open()) || this.engine.state !== "empty") return;
    } catch (error) {
      showNotice(t("{name} cannot be read again ({problem}): choose it again.", { name: lastModel().model.name, problem: error.message }));
    }
    const message = noticeText();
    if (this.engine.state === "empty") {
      this.isSubstitute = true;
      this.startLoad();
    }
    showNotice(message, this.actions.choose);
  }
}

/** Store the page for visits without its server; only after a model is loaded, so as not to slow the first visit. */
async function storePage() {
  if (!navigator.serviceWorker) return;
  try {
    await navigator.serviceWorker.register("sw.js");
    const { active } = await navigator.serviceWorker.ready;
    active.postMessage("refresh");
  } catch { /* forbidden, or the storage is full: the page works while its server runs */ }
}
