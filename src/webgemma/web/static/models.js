// The dialog in which one chooses a model: of this browser, of Ollama on this machine, a file.

import { byId, button, element, humanSize } from "./dom.js";
import { Files, isModelFile } from "./files.js";
import { fitOf, Room, TOO_LARGE } from "./fits.js";
import { Keeping } from "./keeping.js";
import { showNotice } from "./notice.js";
import { confirmed } from "./question.js";
import { Stored } from "./stored.js";

export const BUNDLED = { name: "Bundled model", source: { kind: "bundled" } };

const NO_SERVER = "Ollama’s models are not reachable, because `webgemma web` does not run now. "
  + "The models in this browser work without it.";
const NO_MODELS = "Ollama has no models here. Get one with: ollama pull gemma4:e2b";

const GET_IT = "start `webgemma web`, or pull the model again.";

// A source may have `eyes`, the source of a file that holds what the model sees and hears with.
const fromFile = (file, eyes) => ({
  name: file.name,
  source: { kind: "file", file, ...(eyes && { eyes: { kind: "file", file: eyes } }) },
});
const fromBrowser = ({ id, name }) => ({ name, source: { kind: "stored", id, name } });
const fromOllama = ({ name, url, digest, nbytes, projectors: [eyes] = [] }) => ({
  name,
  source: { kind: "url", url, name, digest, nbytes, ...(eyes && { eyes: { kind: "url", name: `${name}’s eyes`, ...eyes } }) },
});

const isSame = (one, other) => one.kind === other.kind
  && one.id === other.id && one.url === other.url && one.file === other.file;

/** A button that says to a screen reader also what it is about. */
function namedButton(verb, name, className, act) {
  const made = button(verb, className, act);
  made.ariaLabel = `${verb} ${name}`;
  return made;
}

/** Calls `choose({name, source})`. */
export class ModelPicker {
  constructor(engine, choose) {
    this.engine = engine;
    this.current = null; // {name, source} of the model that is loaded
    this.ollama = []; // what the server listed last
    this.dialog = byId("models-dialog");
    this.choose = (model) => {
      this.dialog.close();
      choose({ name: model.name, source: this.stored.best(model.source) });
    };
    const tell = (sentence, isProblem = false) => this.tell(sentence, isProblem);
    this.stored = new Stored(engine);
    this.room = new Room(engine);
    this.keeping = new Keeping(engine, this.stored, tell);
    this.files = new Files({
      take: (file) => this.choose(this.fromFile(file)),
      addEyes: (file) => this.addEyes(file),
      tell,
    });
    for (const part of [this.stored, this.keeping]) part.addEventListener("change", () => this.render());
    byId("model-button").addEventListener("click", () => this.open());
    this.dialog.addEventListener("close", () => this.keeping.moveTo(byId("keeping")));
  }

  fromFile(file) {
    return fromFile(file, this.files.eyes.get(file));
  }

  /** Load the model that is there once more, with eyes. */
  addEyes(file) {
    if (!this.current) {
      this.tell(`${file.name} holds what a model sees and hears with: load the model first, or drop both at once.`, true);
      return;
    }
    const { name, source } = this.current;
    if (source.kind === "file") this.files.eyes.set(source.file, file);
    this.choose({ name, source: { ...source, eyes: { kind: "file", file } } });
  }

  /** Say something where the user looks. */
  tell(sentence, isProblem) {
    if (!this.dialog.open) {
      showNotice(sentence, isProblem ? { name: "Show the models", act: () => this.open() } : null);
      return;
    }
    byId("models-news").textContent = sentence;
    byId("models-news").classList.toggle("problem", isProblem);
  }

  async open() {
    if (!this.dialog.open) this.dialog.showModal();
    this.keeping.moveTo(byId("keeping-in-picker"));
    byId("models-news").textContent = "";
    byId("ollama-state").textContent = this.ollama.length ? "" : "Looking for models of Ollama …";
    this.render();
    await this.look();
  }

  /** Look at what there is, then at what of it fits. */
  async look() {
    await Promise.all([this.lookAtOllama(), this.stored.ask()]);
    await this.room.ask([...this.ollama, ...this.stored.models]);
    this.render();
  }

  async lookAtOllama() {
    let [models, problems, state] = [[], [], NO_SERVER];
    try {
      const response = await fetch("/api/models");
      if (response.ok) ({ models, problems } = await response.json());
      else problems = [await response.text()];
      state = models.length || problems.length ? "" : NO_MODELS;
    } catch { /* there is no server */ }
    this.ollama = models;
    byId("problems").replaceChildren(...problems.map((text) => element("li", "", text)));
    byId("ollama-state").textContent = state;
    this.render();
  }

  /** The names of the models that this GPU has room for. */
  async fitting() {
    await this.look();
    const models = [...this.stored.models.filter((model) => model.whole), ...this.ollama.filter((model) => !model.problem)];
    const fitting = models.filter((model) => ![TOO_LARGE, ""].includes(fitOf(model, this.room.nbytes)));
    return [...new Set([...fitting.map((model) => model.name), BUNDLED.name])];
  }

  /** Show everything as it is now; the focus stays where it is, if that is still there. */
  render() {
    if (!this.dialog.open) return;
    const key = document.activeElement?.closest("[data-key]")?.dataset.key;
    byId("stored").replaceChildren(
      this.item(BUNDLED, { facts: ["small, comes with webgemma"] }),
      ...this.stored.models.filter((model) => !this.isEyes(model)).map((model) => this.storedItem(model)),
    );
    const { freeNbytes } = this.stored;
    byId("stored-state").textContent = freeNbytes === null ? "" : `${humanSize(freeNbytes)} more can be stored here.`;
    byId("ollama").replaceChildren(...this.ollama.map((model) => this.ollamaItem(model)));
    byId("files").replaceChildren(...this.files.visited.map((file) => this.fileItem(file)));
    if (key && !this.dialog.contains(document.activeElement)) {
      const again = [...this.dialog.querySelectorAll("[data-key]")].find((other) => other.dataset.key === key);
      (again && !again.disabled ? again : byId("models-title")).focus();
    }
  }

  /** Whether a stored file is no model, but belongs to one. */
  isEyes({ id, digest }) {
    const ofOllama = this.ollama.flatMap(({ projectors }) => projectors ?? []);
    return this.stored.models.some(({ eyes }) => eyes === id)
      || (digest !== null && ofOllama.some((projector) => projector.digest === digest));
  }

  storedItem(stored) {
    const { id, name, nbytes, have, whole } = stored;
    const isComing = this.keeping.now?.id === id;
    const remove = namedButton("Delete", name, "quiet", () => this.remove(stored));
    const goOn = namedButton("Go on", name, "", () => this.goOn(stored));
    goOn.disabled = this.keeping.now !== null;
    const part = whole ? [] : [isComing ? "on its way" : `${humanSize(have)} of ${humanSize(nbytes)} has come`];
    return this.item(fromBrowser(stored), {
      size: humanSize(nbytes),
      facts: part,
      fit: fitOf(stored, this.room.nbytes),
      isDisabled: !whole,
      actions: isComing ? [] : [...(whole ? [] : [goOn]), remove],
    });
  }

  ollamaItem(model) {
    const { source } = fromOllama(model);
    return this.item(fromOllama(model), {
      size: model.problem ? "" : humanSize(model.nbytes),
      facts: [model.family, model.parameters, model.quantisation, this.stored.copyOf(source)?.whole && "kept"],
      fit: fitOf(model, this.room.nbytes),
      isDisabled: Boolean(model.problem),
      problem: model.problem,
      actions: model.problem ? [] : this.keepButton(source, model.name),
    });
  }

  fileItem(file) {
    const { source } = this.fromFile(file);
    return this.item(this.fromFile(file), {
      size: humanSize(file.size),
      facts: ["of this visit", source.eyes && `with ${source.eyes.file.name}`, this.stored.copyOf(source)?.whole && "kept"],
      actions: this.keepButton(source, file.name),
    });
  }

  /** Keep, unless it is kept or half of it has come, which stands among the stored ones. */
  keepButton(source, name) {
    if (this.stored.copyOf(source)) return [];
    const keep = namedButton("Keep", name, "quiet", () => this.keep(source));
    keep.title = "Keep it in this browser: it loads faster, and also offline";
    keep.disabled = this.keeping.now !== null;
    return [keep];
  }

  item(model, { size = "", facts = [], fit = "", isDisabled = false, problem = null, actions = [] }) {
    const choice = button("", "model", () => this.choose(model));
    choice.disabled = isDisabled;
    const line = element("span", "facts", facts.filter(Boolean).join(" · "));
    if (fit) line.append(line.textContent ? " · " : "", element("span", fit === TOO_LARGE ? "problem" : "", fit));
    choice.append(element("span", "name", model.name), element("span", "size", size), line);
    if (this.current && isSame(model.source, this.current.source)) choice.setAttribute("aria-current", "true");
    const item = element("li", "", choice, actions.length ? element("div", "acts", actions) : []);
    [choice, ...actions].forEach((control, at) => {
      control.dataset.key = `${model.source.kind} ${model.source.id ?? ""} ${model.name} ${at && control.textContent}`;
    });
    if (problem) item.append(element("p", "problem", problem));
    return item;
  }

  /** The rest of a copy comes from where its first part came from. */
  goOn(stored) {
    const model = this.ollama.find(({ digest, problem }) => digest && digest === stored.digest && !problem);
    if (model) this.keep(fromOllama(model).source);
    else if (isModelFile(stored)) this.files.again(stored.name, stored.nbytes, (file) => this.keep(fromFile(file).source));
    else this.tell(`The rest of ${stored.name} comes from Ollama, where it is not found now: ${GET_IT}`, true);
  }

  keep(source) {
    byId("models-news").textContent = "";
    this.keeping.start(source);
  }

  async remove(stored) {
    const { id, name } = stored;
    const isLoaded = this.current !== null && isSame(fromBrowser(stored).source, this.current.source);
    const warning = isLoaded ? " It is loaded now: the bundled model takes its place." : "";
    if (!await confirmed(`Delete ${name} from this browser?${warning}`, "Delete")) return;
    if (isLoaded) this.choose(BUNDLED);
    this.engine.forget(id);
  }
}
