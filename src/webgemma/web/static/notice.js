// One notice above the conversation: a sentence, and perhaps one thing to do about it.

import { byId } from "./dom.js";

/** Things a user can do that the worker's sentence cannot know of. */
const ADVICE = {
  "no-webgpu": "",
  "device-lost": "Your conversation is kept.",
  storage: "Make room on this device, or choose a smaller model.",
  file: "Choose another model.",
  memory: "",
  senses: "If there is such a file (mmproj….gguf), drop it on this page.",
  other: "",
};

let act = () => {};

export function hideNotice() {
  byId("notice").hidden = true;
}

/** What is shown now, if anything is. */
export const noticeText = () => (byId("notice").hidden ? "" : byId("notice-text").textContent);

/** Show a sentence; `action` is {name, act}. */
export function showNotice(sentence, action = null) {
  byId("notice").hidden = false;
  byId("notice-text").textContent = sentence;
  byId("notice-action").hidden = action === null;
  byId("notice-action").textContent = action?.name ?? "";
  act = action?.act ?? (() => {});
}

/** The sentence of an error and what to do, for a person. */
export function errorSentence({ sentence, kind }) {
  return [sentence, ADVICE[kind] ?? ""].filter(Boolean).join(" ");
}

byId("notice-close").addEventListener("click", hideNotice);
byId("notice-action").addEventListener("click", () => {
  hideNotice();
  act();
});
