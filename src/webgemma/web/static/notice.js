// The notice above the conversation: a message, and an optional action.

import { byId } from "./dom.js";
import { t } from "./language.js";

/** What the user can do on the page about an error, by its kind. */
const ADVICE = {
  "no-webgpu": "",
  "device-lost": t("Your conversation is saved."),
  storage: t("Free disk space on this device, or choose a smaller model."),
  file: t("Choose another model."),
  memory: "",
  "no-encoder": t("If you have the model’s mmproj file (mmproj….gguf), drop it on this page."),
  other: "",
};

let act = () => {};

export function hideNotice() {
  byId("notice").hidden = true;
}

/** Return the message that is shown, or "". */
export const noticeText = () => (byId("notice").hidden ? "" : byId("notice-text").textContent);

/** Show a message; `action` is {name, act}. */
export function showNotice(message, action = null) {
  byId("notice").hidden = false;
  byId("notice-text").textContent = message;
  byId("notice-action").hidden = action === null;
  byId("notice-action").textContent = action?.name ?? "";
  act = action?.act ?? (() => {});
}

/** Return the message of an error with advice. */
export function errorMessage({ message, kind }) {
  return [message, ADVICE[kind] ?? ""].filter(Boolean).join(" ");
}

byId("notice-close").addEventListener("click", hideNotice);
byId("notice-action").addEventListener("click", () => {
  hideNotice();
  act();
});
