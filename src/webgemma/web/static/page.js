// Fills the page: the models of the local store, and what this browser can do.

const byId = (id) => document.getElementById(id);

/** An element with text; text from outside is never read as HTML. */
function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** Bytes as people write them: 7.2 GB, in powers of ten, as Ollama shows them. */
function humanSize(nbytes) {
  const units = ["B", "kB", "MB", "GB"];
  let size = nbytes;
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size.toFixed(unit === 0 || size >= 99.5 ? 0 : 1)} ${units[unit]}`;
}

async function getJson(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

function modelItem(model) {
  const title = element("div", "",
    element("span", "name", model.name),
    element("span", "size", model.problem ? "" : humanSize(model.nbytes)));
  const facts = [model.family, model.parameters, model.quantisation].filter(Boolean).join(" · ");
  const item = element("li", "", title);
  if (facts) item.append(element("p", "facts", facts));
  if (model.problem) item.append(element("p", "problem", model.problem));
  return item;
}

async function showModels() {
  const state = byId("models-state");
  try {
    const { models, problems } = await getJson("/api/models");
    byId("models").replaceChildren(...models.map(modelItem));
    byId("problems").replaceChildren(...problems.map((text) => element("li", "", text)));
    state.textContent = { 0: "There are none. Get one with: ollama pull gemma4:e2b", 1: "One model." }[
      models.length] ?? `${models.length} models.`;
  } catch (error) {
    state.textContent = `The models cannot be listed: ${error.message}`;
  }
}

async function gpuName() {
  if (!navigator.gpu) return "none: this browser has no WebGPU";
  const adapter = await navigator.gpu.requestAdapter();
  if (!adapter) return "none: WebGPU finds no graphics adapter";
  const { description, vendor, architecture } = adapter.info;
  const software = adapter.info.isFallbackAdapter ? " (software, slow)" : "";
  return (description || [vendor, architecture].filter(Boolean).join(" ") || "yes") + software;
}

async function showBrowser() {
  const facts = { GPU: await gpuName().catch((error) => `none: ${error.message}`) };
  const storage = await navigator.storage?.estimate?.().catch(() => null);
  if (storage?.quota) facts["Room for models"] = humanSize(storage.quota - storage.usage);
  byId("browser").replaceChildren(
    ...Object.entries(facts).flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
}

async function showVersion() {
  const about = await getJson("/api/about").catch(() => null);
  if (about) byId("version").textContent = `webgemma ${about.version}`;
}

showModels();
showBrowser();
showVersion();
