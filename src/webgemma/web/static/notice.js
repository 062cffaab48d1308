// The notice above the conversation: a message, and an optional action.

import { byId } from "./dom.js";
import { isolated, t } from "./language.js";
import { isHosted } from "./scope.js";

/** What is wrong, by the kind of an error, where the page says it better than the engine. */
const SENTENCES = {
  "no-webgpu": t("This browser offers no GPU: use a browser with WebGPU (a current Chrome, Edge or Safari, or Firefox on Windows or a Mac), switch hardware acceleration on, and open the page over https or from localhost."),
  "device-lost": t("The GPU was lost: its driver was reset, or the browser has removed it. Your conversation is saved."),
  "no-model": t("No model is loaded: choose one."),
  "no-schemas": t("Replies by a schema need a part of this page that cannot be loaded: check that the page’s server is running, then reload the page."),
  "no-server": isHosted
    ? t("The server of this page does not respond. Check the connection, then reload the page.")
    : t("`webgemma web` does not respond: start it again, then reload the page."),
  "no-pyodide": t("This server has no Pyodide, which runs Python in the browser: see what `webgemma web` printed when it started."),
};

/** What the user can do on the page about an error, by its kind. */
const ADVICE = {
  storage: t("Free disk space on this device, or choose a smaller model."),
  file: t("Choose another model."),
  memory: t("Choose a smaller model, or a smaller context in the settings."),
  device: t("Choose another model; if none works, update this browser and the driver of the GPU."),
  prompt: t("Write less, or choose a larger context in the settings."),
  "no-encoder": t("If you have the model’s mmproj file (mmproj….gguf), drop it on this page."),
};

let act = () => {};

export function hideNotice() {
  byId("notice").hidden = true;
}

/** Return the message that is shown, or "". */
export const noticeText = () => (byId("notice").hidden ? "" : byId("notice-text").textContent);

/** Show a message; `action` is {name, act}. */
export function showNotice(message, action = null) {
  const notice = byId("notice");
  notice.hidden = false;
  notice.classList.toggle("over", byId("sidebar").classList.contains("open")); // what is done in a drawer is told there
  if (notice.classList.contains("over")) notice.inert = false;
  byId("notice-text").textContent = message;
  byId("notice-action").hidden = action === null;
  byId("notice-action").textContent = action?.name ?? "";
  act = action?.act ?? (() => {});
}

/** Return the message of an error with advice. */
export function errorMessage({ message, kind }) {
  if (kind in SENTENCES) {
    console.warn(message); // the engine's own words
    return SENTENCES[kind];
  }
  return [message && isolated(message), ADVICE[kind] ?? ""].filter(Boolean).join(" "); // in English, before a translation
}

byId("notice-close").addEventListener("click", hideNotice);
byId("notice-action").addEventListener("click", () => {
  hideNotice();
  act();
});
